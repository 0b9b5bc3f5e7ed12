"""All families."""

from __future__ import annotations

from clcomm.engine.tuning import Tuning
from tests.families import (
    attentions,
    channels,
    convolutions,
    elements,
    functions,
    fused,
    host,
    indices,
    parts,
    pools,
    products,
    recurrences,
    rows,
    stored,
)

#: By name; those of products with an ending, which double their builds, come apart from the plain ones.
FAMILIES = {
    family.name: family
    for family in (
        convolutions.CONVOLUTION, convolutions.CONVOLUTION_OF_ONE_WIDTH, convolutions.CONVOLUTION_AS_PRODUCTS,
        convolutions.CONVOLUTION_IN_GROUPS, convolutions.CONVOLUTION_OF_WINOGRAD,
        pools.POOLING, pools.ADAPTIVE_POOLING, channels.BATCH_NORM, channels.BATCH_NORM_OF_RANKS,
        channels.GROUP_NORM,
        products.PLAIN_PRODUCT, products.PRODUCT, products.LINEAR, products.CHAIN,
        products.BATCH, attentions.ATTENTION, rows.CLASS_LOSSES, rows.ELEMENT_LOSSES,
        rows.SOFTMAX, rows.LAYER_NORM, rows.EMBEDDING, indices.INDICES, indices.LABELS, parts.VOCABULARY,
        rows.SQUARED_ERROR,
        rows.REDUCTION, indices.RESAMPLING,
        elements.ARITHMETIC, elements.TRANSPOSE, elements.BLOCKS, elements.ACTIVATIONS, elements.DROPOUT,
        elements.OPTIMIZERS, functions.FUNCTIONS, functions.COMPARISONS, functions.ORDERED, fused.FUSED, stored.STORED,
        recurrences.RECURRENCES,
        host.FOLD, host.RENDEZVOUS, host.SHARED_WORK, host.CODING, host.FACTORS, host.HASH, host.GATHER,
    )
}  # fmt: skip
#: The sizes of CPUs with vectors of 16 floats, and the families whose kernels they change.
WIDE = Tuning(gemm_tile=(12, 32, 16), conv_lanes=16, loop_lanes=16)
WIDE_FAMILIES = (
    "convolution", "convolution of one width", "convolution as products", "convolution in groups",
    "convolution by Winograd",
    "plain product", "product", "linear layer",
    "layers after ReLU", "batch of products", "squared error", "arithmetic", "activations", "optimizers", "fold",
    "coding", "factors", "attention", "losses of elements", "stored parameters",
    "functions", "comparisons", "fused functions",
)  # fmt: skip
#: Families of vectors that stay as they are, in builds for such CPUs; Oclgrind tracks what is initialised in them.
ALSO_WIDE = ("batch norm", "batch norm of ranks", "group norm", "adaptive pooling", "dropout", "recurrent layers")
