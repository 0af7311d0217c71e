//! Causal attention of several heads, forward and backward, without a matrix of all pairs. It takes one tile of queries
//! at a time, whose weights the backward pass computes again (Dao et al., "FlashAttention", 2022).

use std::ops::Range;

use super::matmul::{Matrix, Target};
use super::pointwise::{causal_softmax, causal_softmax_again, softmax_slope};

/// Queries of a tile.
const TILE: usize = 64;

/// How sequences and heads lie in the rows of a batch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Attention {
    /// Sequences.
    pub(super) sequences: usize,
    /// Rows of a sequence.
    pub(super) time: usize,
    /// Heads.
    pub(super) heads: usize,
    /// Columns of all heads together.
    pub(super) width: usize,
}

/// Memory for one tile.
#[derive(Debug, Default, Clone)]
pub(super) struct Scratch {
    weights: Vec<f32>,
    slope: Vec<f32>,
}

/// One head of one sequence, with one tile of its queries.
struct Tile {
    /// First place of the head's first query, key or value in rows of three widths.
    triple: usize,
    /// The same in rows of one width.
    single: usize,
    /// The logarithms of the head's rows.
    logs: usize,
    /// The queries, as rows of the sequence.
    rows: Range<usize>,
}

impl Attention {
    fn columns(self) -> usize {
        self.width / self.heads
    }

    fn scale(self) -> f32 {
        1.0 / (self.columns() as f32).sqrt()
    }

    fn tiles(self) -> impl Iterator<Item = Tile> {
        let heads = (0..self.sequences).flat_map(move |sequence| (0..self.heads).map(move |head| (sequence, head)));
        heads.flat_map(move |(sequence, head)| {
            (0..self.time).step_by(TILE).map(move |first| Tile {
                triple: sequence * self.time * 3 * self.width + head * self.columns(),
                single: sequence * self.time * self.width + head * self.columns(),
                logs: (sequence * self.heads + head) * self.time,
                rows: first..(first + TILE).min(self.time),
            })
        })
    }

    /// Queries, keys or values (0, 1 or 2) of some rows of the tile's head.
    fn part<'a>(self, triples: &'a [f32], tile: &Tile, which: usize, rows: Range<usize>) -> Matrix<'a> {
        let start = tile.triple + which * self.width + rows.start * 3 * self.width;
        Matrix::spaced(&triples[start..], rows.len(), self.columns(), 3 * self.width)
    }

    fn part_mut<'a>(self, triples: &'a mut [f32], tile: &Tile, which: usize, rows: Range<usize>) -> Target<'a> {
        let start = tile.triple + which * self.width + rows.start * 3 * self.width;
        Target::spaced(&mut triples[start..], rows.len(), self.columns(), 3 * self.width)
    }

    /// Writes the heads' outputs into `outputs`. Each row of `triples` holds the queries of all heads, then their keys,
    /// then their values; `logs` keeps a number for each head and row.
    pub(super) fn forward(self, triples: &[f32], outputs: &mut [f32], logs: &mut [f32], scratch: &mut Scratch) {
        for tile in self.tiles() {
            let (count, seen) = (tile.rows.len(), tile.rows.end);
            scratch.weights.resize(count * seen, 0.0);
            let queries = self.part(triples, &tile, 0, tile.rows.clone());
            let keys = self.part(triples, &tile, 1, 0..seen);
            Target::spaced(&mut scratch.weights, count, seen, seen).set(queries, keys.transposed());
            let logs = &mut logs[tile.logs + tile.rows.start..][..count];
            causal_softmax(&mut scratch.weights, seen, tile.rows.start + 1, self.scale(), logs);
            let values = self.part(triples, &tile, 2, 0..seen);
            let start = tile.single + tile.rows.start * self.width;
            Target::spaced(&mut outputs[start..], count, self.columns(), self.width)
                .set(Matrix::new(&scratch.weights, count, seen), values);
        }
    }

    /// Writes the derivative by `triples` into `slope`. `output_slope` is the derivative by `outputs`.
    pub(super) fn backward(
        self,
        triples: &[f32],
        (outputs, output_slope): (&[f32], &[f32]),
        logs: &[f32],
        slope: &mut [f32],
        scratch: &mut Scratch,
    ) {
        slope.fill(0.0);
        for tile in self.tiles() {
            let (count, seen) = (tile.rows.len(), tile.rows.end);
            let Scratch { weights, slope: inner } = &mut *scratch;
            weights.resize(count * seen, 0.0);
            inner.resize(count * seen, 0.0);
            let queries = self.part(triples, &tile, 0, tile.rows.clone());
            let keys = self.part(triples, &tile, 1, 0..seen);
            let values = self.part(triples, &tile, 2, 0..seen);
            Target::spaced(weights, count, seen, seen).set(queries, keys.transposed());
            let logs = &logs[tile.logs + tile.rows.start..][..count];
            causal_softmax_again(weights, seen, tile.rows.start + 1, self.scale(), logs);

            let start = tile.single + tile.rows.start * self.width;
            let from_above = Matrix::spaced(&output_slope[start..], count, self.columns(), self.width);
            self.part_mut(slope, &tile, 2, 0..seen).add(Matrix::new(weights, count, seen).transposed(), from_above);
            Target::spaced(inner, count, seen, seen).set(from_above, values.transposed());
            let made = (&outputs[start..], &output_slope[start..]);
            softmax_slope(weights, inner, seen, self.scale(), made, (self.columns(), self.width));
            let inner = Matrix::new(inner, count, seen);
            self.part_mut(slope, &tile, 0, tile.rows.clone()).set(inner, keys);
            self.part_mut(slope, &tile, 1, 0..seen).add(inner.transposed(), queries);
        }
    }
}
