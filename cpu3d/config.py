from cpu3d.settings import *  # noqa
