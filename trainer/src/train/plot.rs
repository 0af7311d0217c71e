//! Draws the loss of a run and the changes of its group as SVG, without a library.

#![deny(clippy::disallowed_methods, clippy::disallowed_types)]

use std::fmt::Write;

/// A completed step.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Point {
    /// Counted from 1.
    pub step: u64,
    /// Its mean loss.
    pub loss: f32,
    /// The round that did the step.
    pub round: u64,
    /// The number of ranks that shared the step.
    pub world_size: u32,
}

/// Size of the picture, and the margins that hold the labels.
const WIDTH: f64 = 960.0;
const HEIGHT: f64 = 480.0;
const LEFT: f64 = 70.0;
const RIGHT: f64 = 20.0;
const TOP: f64 = 50.0;
const BOTTOM: f64 = 50.0;

/// The most points of the curve. In a longer run, each point is the mean of several steps.
const POINTS: usize = 800;

/// About how many lines the grid has in each direction.
const GRID: f64 = 6.0;

const STYLE: &str = "text{font:13px sans-serif;fill:#333}.grid{stroke:#ddd}.loss{fill:none;stroke:#2563eb;stroke-width:1.5}\
    .change{stroke:#dc2626;stroke-dasharray:4 3}.reachable{stroke:#16a34a;stroke-dasharray:8 4}";

/// Draws a run's steps (each once, in order), and the loss that can be reached, if it is known.
/// Steps that are not in `points` are left out.
pub(crate) fn draw(points: &[Point], reachable: Option<f64>) -> String {
    let frame = Frame::around(points, reachable);
    let mut svg = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {HEIGHT}\" role=\"img\">\n\
         <title>Loss over steps</title>\n<style>{STYLE}</style>\n\
         <rect width=\"{WIDTH}\" height=\"{HEIGHT}\" fill=\"white\"/>\n"
    );
    frame.grid(&mut svg);
    if let Some(loss) = reachable {
        line(&mut svg, "reachable", (LEFT, frame.y(loss)), (WIDTH - RIGHT, frame.y(loss)));
        // Here the label does not touch the curve, which is far above, or the numbers of the steps.
        text(&mut svg, (LEFT + 6.0, frame.y(loss) - 6.0), "start", &format!("{loss:.4} is reachable"));
    }
    frame.changes(&mut svg, points);
    frame.curve(&mut svg, points);
    text(&mut svg, (LEFT, TOP - 30.0), "start", "loss");
    text(&mut svg, (WIDTH - RIGHT, HEIGHT - 10.0), "end", "step");
    svg + "</svg>\n"
}

/// The part of the plane that is shown.
struct Frame {
    steps: (f64, f64),
    losses: (f64, f64),
}

impl Frame {
    fn around(points: &[Point], reachable: Option<f64>) -> Frame {
        let steps = points.iter().map(|point| point.step as f64);
        let losses = points.iter().map(|point| f64::from(point.loss)).chain(reachable);
        Frame { steps: extent(steps), losses: extent(losses.filter(|loss| loss.is_finite())) }
    }

    fn x(&self, step: f64) -> f64 {
        LEFT + (step - self.steps.0) / (self.steps.1 - self.steps.0) * (WIDTH - LEFT - RIGHT)
    }

    fn y(&self, loss: f64) -> f64 {
        HEIGHT - BOTTOM - (loss - self.losses.0) / (self.losses.1 - self.losses.0) * (HEIGHT - TOP - BOTTOM)
    }

    fn grid(&self, svg: &mut String) {
        for step in ticks(self.steps).filter(|step| step.fract() == 0.0) {
            line(svg, "grid", (self.x(step), TOP), (self.x(step), HEIGHT - BOTTOM));
            text(svg, (self.x(step), HEIGHT - BOTTOM + 18.0), "middle", &format!("{step}"));
        }
        for loss in ticks(self.losses) {
            line(svg, "grid", (LEFT, self.y(loss)), (WIDTH - RIGHT, self.y(loss)));
            text(svg, (LEFT - 8.0, self.y(loss) + 4.0), "end", &number(loss));
        }
    }

    /// A line where a round begins, with the workers before and after.
    fn changes(&self, svg: &mut String, points: &[Point]) {
        // Neighbours write on different heights.
        for (count, pair) in points.windows(2).filter(|pair| pair[0].round != pair[1].round).enumerate() {
            let x = self.x((pair[0].step + pair[1].step) as f64 / 2.0);
            line(svg, "change", (x, TOP), (x, HEIGHT - BOTTOM));
            let words = format!("{}→{}", pair[0].world_size, pair[1].world_size);
            text(svg, (x, TOP - 6.0 - 15.0 * (count % 2) as f64), "middle", &words);
        }
    }

    fn curve(&self, svg: &mut String, points: &[Point]) {
        let finite: Vec<&Point> = points.iter().filter(|point| point.loss.is_finite()).collect();
        let mut path = String::new();
        for group in finite.chunks(finite.len().div_ceil(POINTS).max(1)) {
            let mean = |of: fn(&Point) -> f64| group.iter().map(|point| of(point)).sum::<f64>() / group.len() as f64;
            let (x, y) = (self.x(mean(|point| point.step as f64)), self.y(mean(|point| f64::from(point.loss))));
            let _ = write!(path, "{x:.1},{y:.1} ");
        }
        let _ = writeln!(svg, "<polyline class=\"loss\" points=\"{}\"/>", path.trim_end());
    }
}

/// The smallest and the largest value, moved apart if they are equal.
fn extent(values: impl Iterator<Item = f64>) -> (f64, f64) {
    let none = (f64::INFINITY, f64::NEG_INFINITY);
    match values.fold(none, |(low, high), value| (low.min(value), high.max(value))) {
        (low, high) if low < high => (low, high),
        (low, high) if low == high => (low - 0.5, high + 0.5),
        _ => (0.0, 1.0),
    }
}

/// Multiples of 1, 2 or 5 times a power of ten.
fn ticks((low, high): (f64, f64)) -> impl Iterator<Item = f64> {
    let rough = (high - low) / GRID;
    let power = 10f64.powf(rough.log10().floor());
    let distance = [1.0, 2.0, 5.0, 10.0].into_iter().map(|factor| factor * power).find(|&distance| distance >= rough);
    let distance = distance.unwrap_or(10.0 * power);
    let (first, last) = ((low / distance).ceil() as i64, (high / distance).floor() as i64);
    (first..=last).map(move |count| count as f64 * distance)
}

/// A number's text, rounded to six digits after the point.
fn number(value: f64) -> String {
    let text = format!("{value:.6}");
    text.trim_end_matches('0').trim_end_matches('.').to_owned()
}

// Writing to a string cannot fail.

fn line(svg: &mut String, class: &str, (x1, y1): (f64, f64), (x2, y2): (f64, f64)) {
    let _ = writeln!(svg, "<line class=\"{class}\" x1=\"{x1:.1}\" y1=\"{y1:.1}\" x2=\"{x2:.1}\" y2=\"{y2:.1}\"/>");
}

fn text(svg: &mut String, (x, y): (f64, f64), anchor: &str, words: &str) {
    let _ = writeln!(svg, "<text x=\"{x:.1}\" y=\"{y:.1}\" text-anchor=\"{anchor}\">{words}</text>");
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Asserts that tags are closed in order and that attributes are quoted, and returns each tag's text.
    fn tags(svg: &str) -> Vec<&str> {
        let (mut open, mut found) = (Vec::new(), Vec::new());
        for part in svg.split('<').skip(1) {
            let (tag, after) = part.split_once('>').expect("a tag ends");
            assert!(!after.contains('&') && !tag.contains("NaN") && !tag.contains("inf"), "{part}");
            assert_eq!(tag.matches('"').count(), 2 * tag.matches("=\"").count(), "{tag}");
            let name = tag.split_whitespace().next().unwrap();
            match name.strip_prefix('/') {
                Some(name) => assert_eq!(open.pop(), Some(name)),
                None if !tag.ends_with('/') => open.push(name),
                None => {}
            }
            found.push(tag);
        }
        assert!(open.is_empty() && svg.trim_end().ends_with("</svg>"), "{open:?}");
        found
    }

    fn point(step: u64, loss: f32, round: u64, world_size: u32) -> Point {
        Point { step, loss, round, world_size }
    }

    #[test]
    fn a_run_is_drawn_with_its_changes() {
        let worlds = |step| {
            if step <= 40 {
                (1, 3)
            } else if step <= 41 {
                (2, 2)
            } else {
                (3, 4)
            }
        };
        let points: Vec<Point> =
            (1..=100).map(|step| point(step, 4.0 / step as f32, worlds(step).0, worlds(step).1)).collect();
        let svg = draw(&points, Some(0.01));
        let tags = tags(&svg);
        assert_eq!(tags.iter().filter(|tag| tag.starts_with("line class=\"change\"")).count(), 2);
        assert!(svg.contains(">3→2<") && svg.contains(">2→4<") && svg.contains(">0.0100 is reachable<"));
        // From the upper left corner to the lower right: the first loss is the largest, the last the smallest but one.
        let curve = tags.iter().find(|tag| tag.starts_with("polyline")).unwrap();
        let curve = curve.split('"').nth(3).unwrap();
        let places: Vec<&str> = curve.split(' ').collect();
        assert_eq!((places.len(), places[0]), (100, "70.0,50.0"));
        assert!(places[99].starts_with("940.0,42"), "{}", places[99]);
    }

    #[test]
    fn little_and_odd_runs_are_drawn_too() {
        for points in [
            vec![],
            vec![point(7, 1.0, 1, 1)],
            vec![point(1, 1.0, 1, 1), point(2, 1.0, 1, 1)],
            vec![point(1, f32::NAN, 1, 1), point(2, f32::INFINITY, 2, 1)],
        ] {
            tags(&draw(&points, None));
        }
        // A long run has no more points than can be seen.
        let long: Vec<Point> = (1..=100_000).map(|step| point(step, (step % 7) as f32, 1, 1)).collect();
        let svg = draw(&long, None);
        tags(&svg);
        assert!(svg.len() < 40_000, "{} bytes", svg.len());
    }

    #[test]
    fn ticks_are_round_numbers() {
        let words = |range| ticks(range).map(number).collect::<Vec<_>>().join(" ");
        assert_eq!(words((1.0, 100.0)), "20 40 60 80 100");
        assert_eq!(words((0.93, 4.2)), "1 2 3 4");
        assert_eq!(words((-0.1, 0.21)), "-0.1 0 0.1 0.2");
    }
}
