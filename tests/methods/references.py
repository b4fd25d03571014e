"""The formulas of the published methods in plain loops, for one image and one layer. They share no code with the package.

Each takes what a layer has: x [N,C] (tokens after attention, or before it for MCTF and ATS), size [N], k [H,N,d], and what
the method needs in addition. It returns the tokens afterwards as a list of (vector, size), the prefix first, the others in
any order."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

Out = list[tuple[Tensor, float]]


def cosine(a: Tensor, b: Tensor) -> float:
    return float(a @ b) / (math.sqrt(float(a @ a)) * math.sqrt(float(b @ b)))


def mean_keys(k: Tensor) -> list[Tensor]:
    heads = len(k)
    return [sum((k[h, i] for h in range(heads)), torch.zeros_like(k[0, i])) / heads for i in range(k.shape[1])]


def ranked(scores: Sequence[float], names: Sequence[int], most_first: bool = True) -> list[int]:
    """Names by score; ties by position."""
    sign = -1 if most_first else 1
    return [name for _, _, name in sorted((sign * s, i, n) for i, (s, n) in enumerate(zip(scores, names, strict=True)))]


def weighted(x: Tensor, group: Sequence[int], weights: Sequence[float]) -> Tensor:
    total = torch.zeros_like(x[0])
    for i, w in zip(group, weights, strict=True):
        total = total + w * x[i]
    return total / sum(weights)


def bipartite(vectors: Sequence[Tensor], sources: Sequence[int], targets: Sequence[int]) -> dict[int, tuple[float, int]]:
    """The best target of each source, with its cosine."""
    found = {}
    for s in sources:
        cosines = [cosine(vectors[s], vectors[t]) for t in targets]
        best = max(range(len(targets)), key=lambda j: (cosines[j], -j))
        found[s] = (cosines[best], targets[best])
    return found


def alternate(n: int, prefix: int) -> tuple[list[int], list[int]]:
    return [i for i in range(prefix, n) if i % 2 == 0], [i for i in range(prefix, n) if i % 2 == 1]


def alone(x: Tensor, size: Tensor, positions: Sequence[int]) -> Out:
    return [(x[i], float(size[i])) for i in positions]


def merged(x: Tensor, size: Tensor, keep: Sequence[int], joins: dict[int, int]) -> Out:
    """Size-weighted means; `joins` says who goes where."""
    out = []
    for position in keep:
        group = [position, *(i for i, into in joins.items() if into == position)]
        sizes = [float(size[i]) for i in group]
        out.append((weighted(x, group, sizes), sum(sizes)))
    return out


def tome_pairs(k: Tensor, prefix: int, r: int) -> tuple[list[int], dict[int, int]]:
    n = k.shape[1]
    sources, targets = alternate(n, prefix)
    best = bipartite(mean_keys(k), sources, targets)
    go = ranked([best[s][0] for s in sources], sources)[:r]
    return [i for i in range(n) if i not in go], {s: best[s][1] for s in go}


def evit(x: Tensor, size: Tensor, row: Tensor, prefix: int, keep: float, fuse: bool) -> Out:
    n = len(x)
    attention = [float(row[:, i].mean()) for i in range(n)]
    order = ranked(attention[prefix:], range(prefix, n))
    left = math.ceil(keep * (n - prefix))
    out = alone(x, size, [*range(prefix), *sorted(order[:left])])
    if fuse:
        fused = torch.zeros_like(x[0])
        for i in order[left:]:
            fused = fused + attention[i] * x[i]
        out.append((fused, sum(float(size[i]) for i in order[left:])))
    return out


def scores_of(row: Tensor, v: Tensor, prefix: int) -> list[float]:
    heads, n, _ = v.shape
    raw = []
    for i in range(prefix, n):
        norm = math.sqrt(sum(float(v[h, i] @ v[h, i]) for h in range(heads)))
        raw.append(sum(float(row[h, i]) for h in range(heads)) * norm)
    return [s / sum(raw) for s in raw]


def ppt(x: Tensor, size: Tensor, row: Tensor, k: Tensor, v: Tensor, prefix: int, r: int, threshold: float) -> Out:
    n = len(x)
    r = min(r, (n - prefix) // 2)
    scores = scores_of(row, v, prefix)
    mean = sum(scores) / len(scores)
    if sum((s - mean) ** 2 for s in scores) / (len(scores) - 1) < threshold:
        return merged(x, size, *tome_pairs(k, prefix, r))
    stay = ranked(scores, range(prefix, n))[: n - prefix - r]
    return alone(x, size, [*range(prefix), *stay])


def ats(x: Tensor, size: Tensor, row: Tensor, v: Tensor, prefix: int, samples: int) -> Out:
    scores = scores_of(row, v, prefix)
    order = ranked(scores, range(len(scores)), most_first=False)
    heights, total = [], 0.0
    for i in order:
        total += scores[i]
        heights.append(total)
    heights = [(h - heights[0]) / (heights[-1] - heights[0]) for h in heights]
    start = min(h for h in heights if h > 0)
    hit = set()
    for j in range(samples - 1):
        wanted = start + (1 - start) * j / (samples - 2)
        hit.add(order[min(range(len(heights)), key=lambda i: abs(heights[i] - wanted))])
    return alone(x, size, [*range(prefix), *(prefix + i for i in sorted(hit))])


def tofu(x: Tensor, size: Tensor, k: Tensor, prefix: int, r: int, drops: bool) -> Out:
    keep, joins = tome_pairs(k, prefix, r)
    if drops:
        return alone(x, size, keep)
    out = []
    for position in keep:
        group = [position, *(i for i, into in joins.items() if into == position)]
        mean = weighted(x, group, [1.0] * len(group))
        longest = max(math.sqrt(float(x[i] @ x[i])) for i in group)
        out.append((mean / math.sqrt(float(mean @ mean)) * longest, sum(float(size[i]) for i in group)))
    return out


def diffrate(x: Tensor, size: Tensor, row: Tensor, prefix: int, prune: int, merge: int) -> Out:
    n = len(x)
    order = ranked([float(row[:, i].mean()) for i in range(prefix, n)], range(prefix, n))
    keep, join = order[: merge - prefix], order[merge - prefix : prune - prefix]
    best = bipartite(list(x), join, keep)
    out = alone(x, size, range(prefix))
    for position in keep:
        mine = [i for i in join if best[i][1] == position]
        group = [position, *mine]
        out.append(
            (weighted(x, group, [1.0] * len(group)), float(size[position]) + sum(float(size[i]) * best[i][0] for i in mine))
        )
    return out


def pitome(x: Tensor, size: Tensor, k: Tensor, prefix: int, keep: float, margin: float, late: bool) -> Out:
    n = len(x)
    vectors, patches = mean_keys(k), range(prefix, n)
    r = math.floor(len(patches) - len(patches) * keep)
    energy = []
    for i in patches:
        terms = [cosine(vectors[i], vectors[j]) - margin for j in patches]
        energy.append(sum(t if t > 0 else math.exp(t) - 1 for t in terms) / len(patches))
    order = ranked(energy, patches)
    crowd = order[: 2 * r] if late else order
    sources, targets = crowd[::2], crowd[1::2]
    best = bipartite(vectors, sources, targets)
    go = sources if late else ranked([best[s][0] for s in sources], sources)[:r]
    return merged(x, size, [i for i in range(n) if i not in go], {s: best[s][1] for s in go})


def bat(x: Tensor, size: Tensor, row: Tensor, prefix: int, keep: float, clusters: float, neighbours: int) -> Out:
    n, width = x.shape
    attention = [float(row[:, i].mean()) for i in range(n)]
    patches = list(range(prefix, n))
    left = math.ceil(keep * len(patches))
    order = ranked([attention[i] for i in patches], patches)
    attentive, others = sorted(order[:left]), sorted(order[left:])
    count = max(1, min(round(clusters * left), len(others), left // 2))

    best = bipartite(list(x), attentive[::2], attentive[1::2])
    go = ranked([best[s][0] for s in attentive[::2]], attentive[::2])[:count]
    groups = {i: [i] for i in range(prefix)} | {i: [i] for i in attentive if i not in go}
    for s in go:
        groups[best[s][1]].append(s)

    far = {(i, j): math.sqrt(float(((x[i] - x[j]) ** 2).sum()) / width) for i in others for j in others}
    density = {}
    for i in others:
        near = sorted(far[i, j] for j in others)[:neighbours]
        density[i] = math.exp(-sum(d * d for d in near) / len(near))
    lonely = {}
    for i in others:
        denser = [far[i, j] for j in others if (density[j], -j) > (density[i], -i)]
        lonely[i] = min(denser) if denser else max(far.values())
    centres = ranked([density[i] * lonely[i] for i in others], others)[:count]
    groups |= {i: [i] for i in centres}
    for i in others:
        if i not in centres:
            groups[min(sorted(centres), key=lambda c: far[i, c])].append(i)
    return [
        (
            weighted(x, group, [attention[i] for i in group]) if len(group) > 1 else x[group[0]],
            sum(float(size[i]) for i in group),
        )
        for group in groups.values()
    ]


def page_rank(weights: Tensor, start: list[float], votes: int, variance: tuple[float, float]) -> list[float]:
    """Importance of each token: votes of all heads, without the heads whose scores vary too little or too much."""
    heads, n, _ = weights.shape
    by_head = []
    for h in range(heads):
        s = [v / sum(start) for v in start]
        for _ in range(votes):
            s = [sum(s[i] * float(weights[h, i, j]) for i in range(n)) for j in range(n)] if n < 40 else (
                torch.tensor(s, dtype=torch.float64) @ weights[h].double()
            ).tolist()  # fmt: skip
        by_head.append([v * n for v in s])
    useful = []
    for s in by_head:
        mean = sum(s) / n
        if variance[0] <= sum((v - mean) ** 2 for v in s) / (n - 1) <= variance[1]:
            useful.append(s)
    useful = useful or by_head
    return [math.sqrt(sum(s[i] ** 2 for s in useful) / len(useful)) for i in range(n)]


def zero_tprune(
    x: Tensor, size: Tensor, k: Tensor, weights: Tensor, prefix: int, keep: float, similar: float, votes: int,
    variance: tuple[float, float], published: bool,
) -> Out:  # fmt: skip
    n = weights.shape[1]
    patches = n - prefix
    gone = patches - math.ceil(keep * patches)
    similar_count = min(round(similar * gone), patches // 2)
    again = published and similar_count > 0

    def start(count: int) -> list[float]:
        return [math.sqrt(count) if published else 1.0] + [1.0] * (count - 1)

    rank = page_rank(weights, start(n), 1 if again else votes, variance)
    order = ranked(rank[prefix:], range(prefix, n))
    half = patches - patches // 2
    best = bipartite(mean_keys(k), order[half:], order[:half])
    dropped = set(ranked([best[s][0] for s in order[half:]], order[half:])[:similar_count])
    stay = [i for i in order if i not in dropped]
    if again:
        left = [*range(prefix), *sorted(stay)]
        rest = weights[:, left][:, :, left]
        rank = page_rank(rest / rest.sum(2, keepdim=True), start(len(left)), votes, variance)
        stay = ranked(rank[prefix:], left[prefix:])
    return alone(x, size, [*range(prefix), *stay[: patches - gone]])


def mctf_groups(
    x: Tensor, size: Tensor, weights: Tensor, prefix: int, r: int, taus: tuple[float, float, float]
) -> tuple[list[list[int]], list[float]]:
    """Groups of tokens that become one, and the weight of each token."""
    heads, n, _ = weights.shape
    attended = [float(weights[:, :, j].sum()) / (heads * n) for j in range(n)]
    sources, targets = alternate(n, prefix)

    def score(i: int, j: int) -> float:
        sim = ((cosine(x[i], x[j]) + 1) / 2) ** (1 / taus[0])
        info = (1 / attended[i] / attended[j]) ** (1 / taus[1])
        return sim * info * float(1 / size[i] / size[j]) ** (1 / taus[2])

    table = {(i, j): score(i, j) for i in sources for j in targets}
    there = r // 2
    best = {i: max(targets, key=lambda j: (table[i, j], -j)) for i in sources}
    go = ranked([table[i, best[i]] for i in sources], sources)[:there]
    into = {i: best[i] for i in go}
    stay = [i for i in sources if i not in go]
    back = {j: max(stay, key=lambda i: (table[i, j], -i)) for j in targets}
    for j in ranked([table[back[j], j] for j in targets], targets)[: r - there]:
        into[j] = back[j]

    def end(i: int) -> int:
        while i in into:
            i = into[i]
        return i

    groups = {i: [i] for i in range(n) if i not in into}
    for i in into:
        groups[end(i)].append(i)
    return list(groups.values()), [attended[i] * float(size[i]) for i in range(n)]


def mctf_attention(
    x: Tensor, weights: Tensor, groups: Sequence[Sequence[int]], each: Sequence[float]
) -> tuple[list[Tensor], Tensor]:
    """Tokens and the map of attention after the merge, [M,C] and [H,M,M]."""
    tokens = [weighted(x, group, [each[i] for i in group]) for group in groups]
    heads = len(weights)
    folded = torch.zeros(heads, len(groups), len(groups), dtype=weights.dtype)
    for h in range(heads):
        for a, rows in enumerate(groups):
            total = sum(each[i] for i in rows)
            for b, columns in enumerate(groups):
                folded[h, a, b] = sum(each[i] / total * float(weights[h, i, j]) for i in rows for j in columns)
    return tokens, folded
