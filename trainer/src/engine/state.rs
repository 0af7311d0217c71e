//! All that training changes: parameters, the numbers that the optimizer keeps for each, and the steps done.

use std::ops::Range;

use super::thread_pool::ThreadPool;
use crate::checkpoint::manifest::{Entry, name_at};
use crate::model::{Moved, Optimizer, Stride, Tensor};

/// The flat state: parameters, then what the optimizer keeps, one kind after the other. Where the optimizer's numbers
/// are sharded, each kind has only those of the parameters that are [owned](State::owned).
#[derive(Debug, Clone, PartialEq)]
pub struct State {
    /// Optimizer steps done.
    pub step: u64,
    /// The numbers.
    pub flat: Vec<f32>,
    /// What the optimizer [keeps](Optimizer::kept).
    kept: &'static [&'static str],
    places: Places,
}

/// Where the numbers of a flat state lie.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Places {
    parameters: usize,
    /// In order; they do not touch.
    owned: Vec<Range<usize>>,
}

impl Places {
    /// Those of a whole state.
    pub(crate) fn whole(parameters: usize) -> Places {
        Places { parameters, owned: all_of(parameters) }
    }

    /// Where the optimizer's numbers of one kind lie for a range that is owned.
    pub(crate) fn of(&self, kind: usize, range: &Range<usize>) -> Range<usize> {
        let before = self.owned.partition_point(|owned| owned.end < range.end);
        let start = self.parameters + kind * count(&self.owned) + count(&self.owned[..before]);
        let within = range.start - self.owned.get(before).map_or(range.start, |owned| owned.start);
        start + within..start + within + range.len()
    }
}

impl State {
    /// Room for a state that is yet to come.
    pub fn room(parameters: usize, optimizer: &Optimizer) -> State {
        // Fresh zeros take no memory until they are written.
        let kept = optimizer.kept();
        State { step: 0, flat: vec![0.0; (1 + kept.len()) * parameters], kept, places: Places::whole(parameters) }
    }

    /// The state before the first step, from first parameters.
    pub fn new(parameters: Vec<f32>, optimizer: &Optimizer) -> State {
        let mut state = State::room(parameters.len(), optimizer);
        state.flat[..parameters.len()].copy_from_slice(&parameters);
        state
    }

    /// A whole state with these numbers, of the same kinds.
    pub(crate) fn whole(&self, step: u64, flat: Vec<f32>) -> State {
        State { step, flat, kept: self.kept, places: Places::whole(self.places.parameters) }
    }

    /// The same with the optimizer's numbers of these parameters: ranges in order. Those that are not here are zero.
    pub(crate) fn owning(&self, owned: Vec<Range<usize>>) -> State {
        let State { step, kept, .. } = *self;
        let places = Places { parameters: self.places.parameters, owned };
        let numbers = places.parameters + kept.len() * count(&places.owned);
        let mut state = State { step, flat: vec![0.0; numbers], kept, places };
        self.copy_to(&mut state.flat, &state.places);
        state
    }

    /// Copies the parameters, and what is owned here and has a place there.
    pub(crate) fn copy_to(&self, flat: &mut [f32], places: &Places) {
        flat[..self.places.parameters].copy_from_slice(self.parameters());
        for mine in &self.places.owned {
            for theirs in &places.owned {
                let both = mine.start.max(theirs.start)..mine.end.min(theirs.end);
                for kind in (0..self.kept.len()).filter(|_| !both.is_empty()) {
                    flat[places.of(kind, &both)].copy_from_slice(&self.flat[self.places.of(kind, &both)]);
                }
            }
        }
    }

    /// The parameters.
    pub fn parameters(&self) -> &[f32] {
        // An engine's own copy may be the only one.
        self.flat.get(..self.places.parameters).unwrap_or_default()
    }

    /// The parameters whose optimizer's numbers are here: ranges in order. All of them, unless these are sharded.
    pub fn owned(&self) -> &[Range<usize>] {
        &self.places.owned
    }

    /// Where all of it lies.
    pub(crate) fn places(&self) -> &Places {
        &self.places
    }

    /// Kinds of numbers that the optimizer keeps.
    pub(crate) fn kinds(&self) -> usize {
        self.kept.len()
    }

    /// CRC-32C of the parameters: equal for equal bits.
    pub fn checksum(&self) -> u32 {
        crc32c::crc32c(bytemuck::cast_slice(self.parameters()))
    }

    /// CRC-32C of the optimizer's numbers of ranges that are owned.
    pub(crate) fn checksum_of(&self, ranges: &[Range<usize>]) -> u32 {
        let pieces = ranges.iter().flat_map(|range| (0..self.kinds()).map(|kind| self.places.of(kind, range)));
        pieces.fold(0, |sum, place| crc32c::crc32c_append(sum, bytemuck::cast_slice(&self.flat[place])))
    }

    /// Does one step along the gradient, all of the pool sharing the work. It moves the parameters that are owned.
    ///
    /// # Panics
    /// When another optimizer made the state.
    pub fn advance(
        &mut self,
        pool: &mut ThreadPool,
        optimizer: &Optimizer,
        stride: &Stride,
        tensors: &[Tensor],
        gradient: &[f32],
    ) {
        self.step += 1;
        let Places { parameters, owned } = &self.places;
        let count = count(owned);
        let piece = pool.piece(count);
        let (mut parameters, kept) = self.flat.split_at_mut(*parameters);
        let mut kept: Vec<&mut [f32]> = kept.chunks_mut(count.max(1)).collect();
        let (mut moved, mut reached) = (Vec::new(), 0);
        for range in owned {
            let (own, rest) = parameters[range.start - reached..].split_at_mut(range.len());
            (parameters, reached) = (rest, range.end);
            for (number, own) in own.chunks_mut(piece).enumerate() {
                let first = range.start + number * piece;
                let gradient = &gradient[first..first + own.len()];
                let kept = kept.iter_mut().filter_map(|kept| kept.split_off_mut(..own.len())).collect();
                moved.push(Moved { first, parameters: own, kept, gradient });
            }
        }
        pool.each(moved, |moved| optimizer.step(stride, tensors, moved));
    }

    /// The tensor that a number of the flat state belongs to.
    pub(crate) fn name_at(&self, tensors: &[Tensor], number: usize) -> String {
        let Places { parameters, owned } = &self.places;
        let number = match number.checked_sub(*parameters) {
            None => number,
            Some(after) => {
                let (kind, mut left) = (after / count(owned), after % count(owned));
                let owned = owned.iter().find(|owned| {
                    let here = left < owned.len();
                    left -= if here { 0 } else { owned.len() };
                    here
                });
                (1 + kind) * parameters + owned.map_or(0, |owned| owned.start) + left
            }
        };
        name_at(&entries(tensors, self.kept), number)
    }

    /// Names for the pieces of the flat state, where it is whole.
    pub fn entries(tensors: &[Tensor], optimizer: &Optimizer) -> Vec<Entry> {
        entries(tensors, optimizer.kept())
    }
}

/// A range of all parameters, if there are any.
pub(crate) fn all_of(parameters: usize) -> Vec<Range<usize>> {
    std::iter::once(0..parameters).filter(|all| !all.is_empty()).collect()
}

fn count(ranges: &[Range<usize>]) -> usize {
    ranges.iter().map(Range::len).sum()
}

fn entries(tensors: &[Tensor], kept: &'static [&'static str]) -> Vec<Entry> {
    let parameters = tensors.last().map_or(0, |tensor| tensor.range.end);
    let section = |(number, prefix): (usize, &'static str)| {
        tensors.iter().map(move |tensor| Entry {
            name: format!("{prefix}{}", tensor.name),
            dtype: "F32".to_owned(),
            shape: tensor.shape.clone(),
            offset: ((number * parameters + tensor.range.start) * size_of::<f32>()) as u64,
            len: (tensor.range.len() * size_of::<f32>()) as u64,
        })
    };
    [""].iter().chain(kept).copied().enumerate().flat_map(section).collect()
}
