"""The released recipes: the sha256 of each, and what is said of a file that differs from it."""

# By name and version; of the file's content as `pinned.content_hash` has it. An entry never changes.
SHA256 = {
    "cpu-tiny/v1": "f2f085fb36b0e023e5e86cf8ab4e6ab139943b02ec2d7b529d04124455b04d80",
    "cpu-tiny/v2": "70ca0700b0dba784f86e5bf9334fe763ed35e6c91584cc01c787c9767d60d3d3",
    "cpu-tiny-groups/v1": "5da68ce4bd117fe17008c8c0857b7ace09aab8f1c3b6b869677ff0a9f0f9e3aa",
    "cpu-tiny-sums/v1": "513caf7103993936a204a09c050a5cb1087956c74f59a05de00bb2352688e700",
    "cpu-smollm2-sums/v1": "2790725e68d95091df1bbca63b636f85082c270647738ba181b564ff0f8e713e",
    "cpu-smollm2-chain-sum/v1": "032e79c917ccbb596dd4c5df1e5147ca514513ad8e67166c92aa4711429b4004",
}


def released_sha256(name: str, version: str, sha256: str) -> str | None:
    """Return the sha256 that a recipe was released with if its file's `sha256` is another one; else None."""
    released = SHA256.get(f"{name}/{version}")
    return None if released == sha256 else released


def difference(sha256: str, released: str | None) -> str:
    """Return in words that a recipe's file differs from its released version, with both hashes; "" if it does not.

    `released` is what `released_sha256` returns.
    """
    return f"differs from its released version: sha256 {sha256[:12]}, released {released[:12]}" if released else ""
