"""How many steps fit a budget of minutes."""

from hypothesis import given, settings
from hypothesis import strategies as st

from cpu3d.settings import RunConfig
from cpu3d.training.budget import cut, steps_within

SECONDS = st.floats(1e-3, 100)


def by_trying_each(config, *, step, steps, at_least, left_s, step_s):
    """The longest run that fits, found from the longest one on down."""
    fits = step
    for total in range(steps, step, -1):
        coarse = max(cut(config, step=step, steps=total).coarse_steps - step, 0)
        if coarse * step_s[0] + (total - step - coarse) * step_s[-1] <= left_s:
            fits = total
            break
    return min(max(fits, at_least, step + len(step_s) - 1), steps)


@st.composite
def budgets(draw):
    """A run of a whole length, of which some steps are done, at half resolution or in full."""
    steps = draw(st.integers(1, 40))
    step = draw(st.integers(0, steps - 1))
    config = RunConfig(curriculum=draw(st.sampled_from(["half", "off"])))
    config = config.with_coarse_share(steps)
    step_s = [draw(SECONDS)]
    if step < config.coarse_steps:
        step_s.append(draw(SECONDS))
    left_s = draw(st.one_of(st.floats(-10, 3000), st.integers(0, 40).map(lambda n: n * step_s[-1])))
    at_least = draw(st.integers(1, steps))
    return config, {
        "step": step,
        "steps": steps,
        "at_least": at_least,
        "left_s": left_s,
        "step_s": step_s,
    }


@settings(max_examples=150, deadline=None)
@given(budgets())
def test_the_steps_that_fit_are_those_that_trying_each_length_finds(budget):
    config, case = budget
    assert steps_within(config, **case) == by_trying_each(config, **case)
