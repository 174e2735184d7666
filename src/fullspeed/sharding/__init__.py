"""ZeRO 0-3 as one runtime: a placement table, one group class with four verbs, hooks that call them."""
