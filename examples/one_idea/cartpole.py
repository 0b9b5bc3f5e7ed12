"""Idea: ranks evaluate different random changes of a policy and exchange scores alone: evolution strategies.

    mpiexec -n 2 python -m examples.one_idea.cartpole

Look at: every rank draws all changes from the same seeds, so a generation moves one number for each evaluation, however
large the policy is (Salimans et al., "Evolution strategies as a scalable alternative to reinforcement learning", 2017).
The pole stays up for longer from generation to generation, up to all 500 steps.
"""

import numpy as np

from clcomm import Communicator

GENERATIONS, PAIRS, SIGMA, RATE, STEPS = 30, 16, 0.5, 0.5, 500
#: Barto, Sutton and Anderson, "Neuronlike adaptive elements that can solve difficult learning control problems", 1983:
#: cart and pole in kg, half the pole's length in m, the push in N, the frictions, and the time between pushes in s.
GRAVITY, CART, POLE, HALF, PUSH, CART_FRICTION, POLE_FRICTION, TAU = 9.8, 1.0, 0.1, 0.5, 10.0, 5e-4, 2e-6, 0.02


def moved(state: np.ndarray, push: float) -> np.ndarray:
    """Return position, speed, angle and angular speed TAU seconds later: the paper's equations, Euler's method."""
    _, speed, angle, turning = state
    mass, sine, cosine = CART + POLE, np.sin(angle), np.cos(angle)
    friction = CART_FRICTION * np.sign(speed)
    from_cart = (-push - POLE * HALF * turning**2 * sine + friction) / mass
    turned = (GRAVITY * sine + cosine * from_cart - POLE_FRICTION * turning / (POLE * HALF)) / (
        HALF * (4 / 3 - POLE * cosine**2 / mass)
    )
    pushed = (push + POLE * HALF * (turning**2 * sine - turned * cosine) - friction) / mass
    return state + TAU * np.array([speed, pushed, turning, turned])


def steps_up(policy: np.ndarray, seed: int) -> int:
    """Return for how many steps a linear policy keeps the pole within 12 degrees and the cart within 2.4 m."""
    state = np.random.default_rng(seed).uniform(-0.05, 0.05, 4)
    for step in range(STEPS):
        state = moved(state, PUSH if policy @ state > 0 else -PUSH)
        if abs(state[0]) > 2.4 or abs(state[2]) > np.radians(12):
            return step
    return STEPS


with Communicator() as comm:
    policy = np.zeros(4)
    for generation in range(GENERATIONS):
        changes = np.random.default_rng(generation).standard_normal((PAIRS, 4))  # the same on every rank
        scores = np.zeros((PAIRS, 2))
        for pair in range(comm.rank, PAIRS, comm.size):  # each rank evaluates its own
            for way, sign in enumerate((1, -1)):
                scores[pair, way] = steps_up(policy + sign * SIGMA * changes[pair], seed=generation)
        comm.all_reduce(scores)  # zeros of the ranks that did not evaluate a pair add nothing
        better = (scores[:, 0] - scores[:, 1]) / (scores.std() + 1e-8)
        policy += RATE / (PAIRS * SIGMA) * better @ changes
        if comm.rank == 0 and generation % 5 == 4:
            print(f"generation {generation + 1}: mean of {scores.mean():.0f} steps")
    ups = [steps_up(policy, seed) for seed in range(1000, 1010)]
    ends = f"up for {np.mean(ups):.0f} of {STEPS} steps, policy {policy.round(3).tolist()}"
    print(f"rank {comm.rank} of {comm.size}: {ends}")
