"""Commands around runs: new recipes and downloads before one, several seeds, and the use of finished models."""
