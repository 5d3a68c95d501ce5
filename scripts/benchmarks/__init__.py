"""One benchmark a module, with ``main(argv)``; its docstring's first line is its entry in the list."""
