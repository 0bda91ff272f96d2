def steps_within(minutes, step_s):
    return max(round(minutes * 60 / step_s), 1)


from cpu3d.settings import SCHEDULES  # noqa
