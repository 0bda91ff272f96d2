"""Several workers that train one run: who they are, how they start, meet, add up and end."""
