"""The scripts that are ported, and what is changed in them besides their imports. None of their code is here."""

from __future__ import annotations

from dataclasses import dataclass

EXAMPLES, NANO_GPT, MIN_GPT = "pytorch/examples", "karpathy/nanoGPT", "karpathy/minGPT"
GANS, CIFAR, U_NET = "eriklindernoren/PyTorch-GAN", "kuangliu/pytorch-cifar", "milesial/Pytorch-UNet"
ATTENTION = "jadore801120/attention-is-all-you-need-pytorch"


@dataclass(frozen=True)
class Script:
    """A script of a repository.

    Attributes:
        name: as the table has it.
        repository: on GitHub.
        folder: in the repository, copied whole.
        file: in the folder.
        arguments: of its command line.
        alike: texts replaced on both sides, mostly dropout, whose draws are not PyTorch's.
        device: texts replaced for the engine, beside the imports.
        driver: a file of `stand_ins` that runs in place of `file`, which it imports: for a model without a training of
            its own, or one that needs a download.
        steps: losses to compare; fewer of large networks.
    """

    name: str
    repository: str
    folder: str
    file: str = "main.py"
    arguments: tuple[str, ...] = ()
    alike: tuple[tuple[str, str], ...] = ()
    device: tuple[tuple[str, str], ...] = ()
    driver: str | None = None
    steps: int = 100


def _example(name: str, folder: str | None = None, **more: object) -> Script:
    return Script(name, EXAMPLES, folder or name, **more)  # type: ignore[arg-type]


#: A policy's draws are not PyTorch's: both actions in turns.
_IN_TURNS = tuple([("m.sample()", f"torch.tensor(len({name}.rewards) % 2)") for name in ("policy", "model")])
#: Scripts without a seed get one.
_CUDA = "cuda = True if torch.cuda.is_available() else False"
_SEEDED = (
    (_CUDA, f"{_CUDA}\nnp.random.seed(1)\ntorch.manual_seed(1)"),
    *[(f"nn.{layer}({p})", f"nn.{layer}(0.0)") for layer, p in (("Dropout", 0.4), ("Dropout2d", 0.25))],
)
_SMALL = ("--batch_size", "16", "--n_epochs", "1", "--lr", "5e-5")
_LANGUAGE = ("--epochs", "1", "--dropout", "0", "--emsize", "32", "--nhid", "32", "--bptt", "12", "--lr", "2")

SCRIPTS = (
    _example("mnist", alike=(("nn.Dropout(0.25)", "nn.Dropout(0.0)"), ("nn.Dropout(0.5)", "nn.Dropout(0.0)")),
             arguments=("--batch-size", "16", "--no-accel")),
    _example("mnist_rnn", alike=(("nn.Dropout2d(0.25)", "nn.Identity()"), ("nn.Dropout2d(0.5)", "nn.Identity()"))),
    _example("vae", arguments=("--no-accel",)),
    _example("regression", alike=(("POLY_DEGREE = 4\n", "POLY_DEGREE = 4\ntorch.manual_seed(1)\n"),)),
    _example("word_language_model: LSTM", "word_language_model", arguments=_LANGUAGE),
    _example("word_language_model: GRU", "word_language_model", arguments=("--model", "GRU", "--tied", *_LANGUAGE)),
    _example("word_language_model: Transformer", "word_language_model",
             arguments=("--model", "Transformer", *_LANGUAGE[:-1], "0.1"),
             alike=(("num_encoder_layers=nlayers)", "num_encoder_layers=nlayers, dropout=0.0)"),)),
    _example("dcgan", arguments=("--dataset", "mnist", "--dataroot", "data", "--ngf", "8", "--ndf", "8",
                                 "--batchSize", "16", "--lr", "2e-6", "--workers", "0", "--manualSeed", "1")),
    _example("siamese_network", arguments=("--batch-size", "16", "--lr", "0.001", "--no-accel")),
    _example("super_resolution", driver="super_resolution.py"),
    _example("fast_neural_style: network", "fast_neural_style/neural_style", driver="style_network.py"),
    _example("mnist_forward_forward", arguments=("--no_accel", "--lr", "0.001", "--epochs", "60", "--train_size", "200",
                                                 "--test_size", "50")),
    _example("reinforcement_learning: REINFORCE", "reinforcement_learning", file="reinforce.py",
             alike=(_IN_TURNS[0], ("p=0.6", "p=0.0"))),
    _example("reinforcement_learning: actor-critic", "reinforcement_learning", file="actor_critic.py",
             alike=(_IN_TURNS[1], ("lr=3e-2", "lr=3e-3"))),
    Script("nanoGPT", NANO_GPT, ".", driver="nano_gpt.py"),
    Script("minGPT", MIN_GPT, ".", driver="min_gpt.py"),
    Script("attention-is-all-you-need", ATTENTION, ".", driver="attention.py",
           alike=(("attn_dropout=0.1", "attn_dropout=0.0"),)),
    Script("Pytorch-UNet", U_NET, ".", driver="u_net.py", steps=20),
    *(Script(f"PyTorch-GAN: {name}", GANS, f"implementations/{name}", f"{name}.py", _SMALL, _SEEDED)
      for name in ("gan", "lsgan", "sgan", "cgan", "acgan", "infogan", "relativistic_gan", "wgan_gp",
                   "wgan_div")),
    Script("PyTorch-GAN: wgan", GANS, "implementations/wgan", "wgan.py", _SMALL, _SEEDED),
    *(Script(f"pytorch-cifar: {name}", CIFAR, ".", driver="cifar.py", arguments=(name,), steps=steps)
      for name, steps in (("LeNet", 100), ("VGG", 50), ("PreActResNet18", 10), ("SENet18", 10), ("MobileNetV2", 10),
                          ("densenet_cifar", 5), ("RegNetX_200MF", 10))),
)  # fmt: skip
