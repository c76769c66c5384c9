"""TreeGRPO: reinforcement learning for diffusion and flow models on a tree of denoising steps (arXiv 2512.08153).

Pure torch; knows nothing of ComfyUI. The modules, lowest first: ``plan``, ``transition``, ``advantage``, ``objective``,
``tree``, ``sampler``, ``policy``, ``trainer``, ``run``, ``lora``, ``cli``.
"""
