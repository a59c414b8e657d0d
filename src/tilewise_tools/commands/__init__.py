"""Commands that are one module each: ``tilewise explain``, ``tilewise layout`` and ``tilewise doctor``."""
