from cpu3d.plan import *  # noqa
from memory_estimator.gpu import BOTTOM  # noqa
