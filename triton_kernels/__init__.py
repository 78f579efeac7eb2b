"""The Triton half of fastcaps, installed as ``fastcaps.triton_kernels``.

A routing lives here under its own name (``attention`` beside ``csrc/cpu/attention.cpp``): a module with
``attention_routing`` and ``attention_routing_backward`` (the ops' records and results, one iteration at a time), and
``refusal``. ``verbs`` has ``vote_scores``, ``vote_sums`` and ``vote_pull`` instead. The folder
is at the top of the repository because it is a backend like ``csrc``. It is installed under ``fastcaps`` because the
bare name ``triton_kernels`` belongs to another package.
"""
