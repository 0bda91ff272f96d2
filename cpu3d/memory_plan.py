from cpu3d.plan import *  # noqa
from cpu3d.plan import Volumes, Plan, _with_estimate  # noqa

volumes_of = Volumes.of


def under(config, policy):
    return config.with_policy(policy)
