"""The Triton half of fastcaps, installed as ``fastcaps.triton_kernels``.

A kernel lives here under the stem of its pass (``attention`` beside ``csrc/cpu/attention.cpp``), so that whoever knows
one backend's file knows the others' names. The folder stands at the top of the repository because it is a backend like
``csrc``; it is installed under ``fastcaps`` because the bare name ``triton_kernels`` belongs to another package.
"""
