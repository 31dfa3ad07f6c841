"""AMD Quark."""
