//! Matrix products on one thread. What does not fit in length or shape is a panic.
#![allow(unsafe_code)]

use std::cell::RefCell;

use gemm::Parallelism;

use elastic_trainer::on_vectors;

/// Side of the tiles in which a matrix is transposed.
const SIDE: usize = 16;
/// The most numbers that are copied: 64 MB for each thread.
const MOST: usize = 1 << 24;

thread_local! {
    /// Room for a right factor that is copied first.
    static COPY: RefCell<Vec<f32>> = const { RefCell::new(Vec::new()) };
}

/// A matrix in a slice, read as stored or transposed.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Matrix<'a> {
    data: &'a [f32],
    rows: usize,
    columns: usize,
    /// Numbers from one row to the next, and from one column to the next.
    strides: (usize, usize),
}

impl<'a> Matrix<'a> {
    /// The matrix whose rows follow each other in `data`.
    pub(crate) fn new(data: &'a [f32], rows: usize, columns: usize) -> Matrix<'a> {
        assert_eq!(data.len(), rows * columns, "a {rows}×{columns} matrix");
        Matrix::spaced(data, rows, columns, columns)
    }

    /// The matrix whose rows begin `stride` numbers apart in `data`: some columns of a wider one.
    pub(crate) fn spaced(data: &'a [f32], rows: usize, columns: usize, stride: usize) -> Matrix<'a> {
        assert_reaches(data, rows, columns, stride);
        Matrix { data, rows, columns, strides: (stride, 1) }
    }

    /// Its transpose, without moving any number.
    pub(crate) fn transposed(self) -> Matrix<'a> {
        let (row, column) = self.strides;
        Matrix { rows: self.columns, columns: self.rows, strides: (column, row), ..self }
    }

    /// Whether a right factor of a product with so many rows is better [copied](Self::in_rows) first. `gemm` copies a
    /// transposed one number by number, each from another row. Rows that begin a multiple of 1 KB apart share few places
    /// of the cache, so that it reads each line again and again.
    fn is_copied_first(self, rows: usize) -> bool {
        let whole_tiles = self.rows.is_multiple_of(SIDE) && self.columns.is_multiple_of(SIDE);
        self.strides.1.is_multiple_of(256) && whole_tiles && rows >= 32 && self.rows * self.columns <= MOST
    }

    /// Copies a transposed matrix into `room`, row by row.
    fn in_rows(self, room: &mut Vec<f32>) -> Matrix<'_> {
        let (rows, columns, stride) = (self.rows, self.columns, self.strides.1);
        room.resize((rows * columns).max(room.len()), 0.0);
        let room = &mut room[..rows * columns];
        on_vectors!({
            for (column, row) in (0..columns).step_by(SIDE).flat_map(|c| (0..rows).step_by(SIDE).map(move |r| (c, r))) {
                let mut tile = [[0.0; SIDE]; SIDE];
                for (number, line) in tile.iter_mut().enumerate() {
                    line.copy_from_slice(&self.data[(column + number) * stride + row..][..SIDE]);
                }
                for number in 0..SIDE {
                    let line: [f32; SIDE] = std::array::from_fn(|place| tile[place][number]);
                    room[(row + number) * columns + column..][..SIDE].copy_from_slice(&line);
                }
            }
        });
        Matrix::new(room, rows, columns)
    }
}

/// Where a product goes.
#[derive(Debug)]
pub(crate) struct Target<'a> {
    data: &'a mut [f32],
    rows: usize,
    columns: usize,
    stride: usize,
}

impl<'a> Target<'a> {
    /// A matrix whose rows begin `stride` numbers apart in `data`.
    pub(crate) fn spaced(data: &'a mut [f32], rows: usize, columns: usize, stride: usize) -> Target<'a> {
        assert_reaches(data, rows, columns, stride);
        Target { data, rows, columns, stride }
    }

    /// Replaces it by `left · right`. Equal shapes and contents give equal bits on one machine.
    pub(crate) fn set(self, left: Matrix<'_>, right: Matrix<'_>) {
        self.product(left, right, false);
    }

    /// Adds `left · right` to it.
    pub(crate) fn add(self, left: Matrix<'_>, right: Matrix<'_>) {
        self.product(left, right, true);
    }

    fn product(self, left: Matrix<'_>, right: Matrix<'_>, add: bool) {
        if right.is_copied_first(left.rows) {
            COPY.with_borrow_mut(|room| self.product_in_place(left, right.in_rows(room), add));
        } else {
            self.product_in_place(left, right, add);
        }
    }

    fn product_in_place(self, left: Matrix<'_>, right: Matrix<'_>, add: bool) {
        assert_eq!(left.columns, right.rows, "inner dimensions");
        assert_eq!((self.rows, self.columns), (left.rows, right.columns), "size of the product");
        let (left_row, left_column) = left.strides;
        let (right_row, right_column) = right.strides;
        // SAFETY: the strides reach only numbers that `assert_reaches` found in the three slices, the shapes fit by the
        // assertions above, and `self.data` cannot overlap the others since it is borrowed mutably.
        unsafe {
            gemm::gemm(
                left.rows,
                right.columns,
                left.columns,
                self.data.as_mut_ptr(),
                1,
                self.stride as isize,
                add,
                left.data.as_ptr(),
                left_column as isize,
                left_row as isize,
                right.data.as_ptr(),
                right_column as isize,
                right_row as isize,
                if add { 1.0 } else { 0.0 },
                1.0,
                false,
                false,
                false,
                Parallelism::None,
            );
        }
    }
}

/// Writes `left · right` into `product`, row by row.
pub(crate) fn multiply(product: &mut [f32], left: Matrix<'_>, right: Matrix<'_>) {
    assert_eq!(product.len(), left.rows * right.columns, "size of the product");
    Target::spaced(product, left.rows, right.columns, right.columns).set(left, right);
}

fn assert_reaches(data: &[f32], rows: usize, columns: usize, stride: usize) {
    assert!(stride >= columns, "rows of {columns} overlap at a distance of {stride}");
    let end = if rows == 0 { 0 } else { (rows - 1) * stride + columns };
    assert!(end <= data.len(), "{rows} rows of {columns}, {stride} apart, in {} numbers", data.len());
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn at(matrix: &Matrix<'_>, row: usize, column: usize) -> f64 {
        f64::from(matrix.data[row * matrix.strides.0 + column * matrix.strides.1])
    }

    proptest! {
        #[test]
        fn products_match_the_definition(
            n in 1usize..20, k in 0usize..20, m in 1usize..20, flip_left: bool, flip_right: bool, apart in 0usize..5,
            add: bool, seed: u64,
        ) {
            let numbers = |count: usize, salt: u64| -> Vec<f32> {
                (0..count as u64).map(|i| elastic_trainer::random::unit(seed ^ salt ^ i) - 0.5).collect()
            };
            let matrix = |rows: usize, columns: usize, salt: u64| numbers(rows * (columns + apart), salt);
            let (left_shape, right_shape) = (if flip_left { (k, n) } else { (n, k) }, if flip_right { (m, k) } else { (k, m) });
            let (left, right) = (matrix(left_shape.0, left_shape.1, 1 << 40), matrix(right_shape.0, right_shape.1, 1 << 41));
            let view = |data, (rows, columns), flip| {
                let matrix = Matrix::spaced(data, rows, columns, columns + apart);
                if flip { matrix.transposed() } else { matrix }
            };
            let (left, right) = (view(&left, left_shape, flip_left), view(&right, right_shape, flip_right));
            let before = numbers(n * (m + apart), 1 << 42);
            let mut product = before.clone();
            let target = Target::spaced(&mut product, n, m, m + apart);
            if add { target.add(left, right) } else { target.set(left, right) }
            for row in 0..n {
                for column in 0..m + apart {
                    let place = row * (m + apart) + column;
                    let was = f64::from(before[place]);
                    let sum: f64 = if column < m { (0..k).map(|i| at(&left, row, i) * at(&right, i, column)).sum() } else { 0.0 };
                    let expected = if add || column >= m { was + sum } else { sum };
                    prop_assert!((f64::from(product[place]) - expected).abs() < 1e-5);
                }
            }
        }
    }

    #[test]
    fn a_transposed_factor_with_rows_far_apart_is_copied_whole() {
        for (rows, inner, columns) in [(32, 16, 16), (40, 48, 32), (33, 256, 16), (40, 37, 45)] {
            let numbers = |count: usize, salt: u64| -> Vec<f32> {
                (0..count as u64).map(|place| elastic_trainer::random::unit(salt << 32 | place) - 0.5).collect()
            };
            let (left, right) = (numbers(rows * inner, 1), numbers(columns * 256, 2));
            let left = Matrix::new(&left, rows, inner);
            let right = Matrix::spaced(&right, columns, inner, 256).transposed();
            assert_eq!(right.is_copied_first(rows), inner != 37);
            let mut product = vec![f32::NAN; rows * columns];
            multiply(&mut product, left, right);
            for (place, found) in product.into_iter().enumerate() {
                let (row, column) = (place / columns, place % columns);
                let expected: f64 = (0..inner).map(|i| at(&left, row, i) * at(&right, i, column)).sum();
                assert!((f64::from(found) - expected).abs() < 1e-5, "{rows}×{inner}×{columns} at {row}, {column}");
            }
        }
    }
}
