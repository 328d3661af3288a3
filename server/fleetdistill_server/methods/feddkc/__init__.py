"""FedDKC, the server half: the rounds in `server`, the refinement of knowledge in the other files.

Wu et al., Exploring the Distributed Knowledge Congruence in Proxy-data-free Federated Distillation, arXiv 2022 / ACM
TIST 2024. The paper's symbols: φ by KKR, eqs. (9) to (14), is `kkr`; other kernels σ, eqs. (21) to (25), `kernels`; ψ
by SKR, eqs. (15) to (20), `skr`; what each of them gives, `refined`; the search of ρ and θ, `bisect`.
"""
