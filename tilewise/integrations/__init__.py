"""tilewise inside other libraries. Each module imports its library; importing tilewise imports none of them."""
