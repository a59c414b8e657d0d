"""Commands that are one module each: ``tilewise explain`` and ``tilewise doctor``."""
