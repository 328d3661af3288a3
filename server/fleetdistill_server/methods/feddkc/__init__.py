"""Server half of FedDKC: `server` contains the rounds, the other files the refinements of knowledge.

Wu et al., Exploring the Distributed Knowledge Congruence in Proxy-data-free Federated Distillation, arXiv 2022 / ACM
TIST 2024. `kkr` implements φ by KKR, eqs. (9) to (14), `kernels` other kernels σ, eqs. (21) to (25), and `skr` ψ by
SKR, eqs. (15) to (20). `refined` has their common result type, `bisect` the search of ρ and θ.
"""
