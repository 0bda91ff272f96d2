from cpu3d.plan import make_plan  # noqa


def resolve(store, run_folder, host, settings, recipe, gpus=(), workers=1):
    return make_plan(store, run_folder, host, settings, recipe, gpus=gpus, workers=workers).config
