"""AMD Quark: integers and minifloats, described by a config of its own."""
