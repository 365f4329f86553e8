"""Single passes: their operations at the roofs, the model of their time, mixed steps, prediction."""
