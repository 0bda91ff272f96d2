"""Made-up volumes with labels: heads with tumours, bodies in CT, warped copies of a real case."""
