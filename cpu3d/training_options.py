from cpu3d.settings import *  # noqa
from cpu3d.settings import Network, AugmentConfig, RunConfig  # noqa
import dataclasses
UNET_FIELDS = {f.name for f in dataclasses.fields(Network)}
AUGMENT_FIELDS = {f.name for f in dataclasses.fields(AugmentConfig)}
RUN_FIELDS = {f.name for f in dataclasses.fields(RunConfig)}
