"""Mathematics that lowerings share: tables of coefficients, sorting by digits, factorisations, tiles."""
