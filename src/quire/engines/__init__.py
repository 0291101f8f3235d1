"""Where models meet the cache; each engine needs an optional library."""
