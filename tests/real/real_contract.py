"""What holds for any model with real weights."""

from real_help import asked, cache_of, text


class RealContract:
    """Tests of the model that goes by `name`."""

    name: str

    def test_a_prompt_is_found_at_every_border_inside_and_beyond_512_tokens(self):
        ids, other = text(self.name, 760), text(self.name, 60, 5000)
        cache = cache_of(self.name, 120)
        asked(cache, self.name, ids)
        assert cache.last.cached_tokens == 0
        for at, cut in enumerate((750, 545, 528, 512, 511, 48)):
            asked(cache, self.name, ids[:cut] + other[at:][:21])
            assert cache.last.cached_tokens >= cut // 16 * 16
