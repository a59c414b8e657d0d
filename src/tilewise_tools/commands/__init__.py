"""The commands ``tilewise explain``, ``tilewise layout`` and ``tilewise doctor``, one module each."""
