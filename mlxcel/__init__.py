"""mlxcel: a language-model server for MLX whose heart is a prompt-prefix KV cache."""

__version__ = "0.1.0"
