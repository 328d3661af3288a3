"""Server half of FedDKC: the rounds in `server`, the refinements of knowledge in the other files.

Wu et al., Exploring the Distributed Knowledge Congruence in Proxy-data-free Federated Distillation, arXiv 2022 / ACM
TIST 2024. Where to find the paper's symbols: φ by KKR, eqs. (9) to (14), in `kkr`; other kernels σ, eqs. (21) to (25),
in `kernels`; ψ by SKR, eqs. (15) to (20), in `skr`; their common result type in `refined`; the search of ρ and θ in
`bisect`.
"""
