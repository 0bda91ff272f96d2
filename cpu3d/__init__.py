"""Train 3D U-Nets on whole brain volumes or on patches: a store of volumes, training, scores,
prediction, reports."""
