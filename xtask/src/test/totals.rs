//! Counting what test programs report.

use std::{
    fmt,
    ops::{Add, AddAssign},
};

/// How many tests ended in which way.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Totals {
    pub(crate) passed: u64,
    pub(crate) failed: u64,
    pub(crate) ignored: u64,
}

impl Totals {
    /// A program that failed without saying which test did.
    pub(crate) const ONE_FAILURE: Totals = Totals {
        passed: 0,
        failed: 1,
        ignored: 0,
    };
}

/// The line that a reader of a CI log looks for.
impl fmt::Display for Totals {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} passed, {} failed", self.passed, self.failed)
    }
}

impl Add for Totals {
    type Output = Totals;

    fn add(self, other: Totals) -> Totals {
        Totals {
            passed: self.passed + other.passed,
            failed: self.failed + other.failed,
            ignored: self.ignored + other.ignored,
        }
    }
}

impl AddAssign for Totals {
    fn add_assign(&mut self, other: Totals) {
        *self = *self + other;
    }
}

/// Adds up the result lines in a test program's output, which arrives in pieces of any size.
#[derive(Debug, Default)]
pub(crate) struct Counter {
    line: Vec<u8>,
    totals: Totals,
    results: u64,
}

impl Counter {
    /// Takes the next piece of output.
    pub(crate) fn feed(&mut self, piece: &[u8]) {
        for byte in piece {
            if *byte == b'\n' {
                self.end_line();
            } else {
                self.line.push(*byte);
            }
        }
    }

    /// The totals, after the program has ended in the way that `succeeded` says. One that reported no result, or
    /// failed although it reported only successes, counts as one failure.
    pub(crate) fn finish(mut self, succeeded: bool) -> Totals {
        self.end_line();
        if self.results == 0 || (!succeeded && self.totals.failed == 0) {
            self.totals += Totals::ONE_FAILURE;
        }
        self.totals
    }

    fn end_line(&mut self) {
        let line = std::mem::take(&mut self.line);
        if let Some(totals) = result_line(&String::from_utf8_lossy(&line)) {
            self.totals += totals;
            self.results += 1;
        }
    }
}

/// Reads `test result: ok. 3 passed; 0 failed; 1 ignored; 0 measured; 5 filtered out; finished in 0.01s`. Text may
/// stand before it: a test's process may have written an unfinished line to the same terminal.
fn result_line(line: &str) -> Option<Totals> {
    let (_, counts) = line.split_once("test result: ")?;
    let (_, counts) = counts.split_once(". ")?;
    let mut numbers = counts.split("; ").map(|part| part.trim().split_once(' '));
    let mut number = |word: &str| match numbers.next()?? {
        (number, what) if what == word => number.parse().ok(),
        _ => None,
    };
    Some(Totals {
        passed: number("passed")?,
        failed: number("failed")?,
        ignored: number("ignored")?,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const OK: &str = "test result: ok. 3 passed; 0 failed; 1 ignored; 0 measured; 5 filtered out; finished in 0.01s\n";
    const BAD: &str =
        "test result: FAILED. 2 passed; 4 failed; 0 ignored; 0 measured; 0 filtered out; finished in 1.5s\n";

    fn count(pieces: &[&str], succeeded: bool) -> Totals {
        let mut counter = Counter::default();
        pieces.iter().for_each(|piece| counter.feed(piece.as_bytes()));
        counter.finish(succeeded)
    }

    #[test]
    fn result_lines_add_up() {
        assert_eq!(
            count(&["running 3 tests\n", OK, "\n", BAD], false),
            Totals {
                passed: 5,
                failed: 4,
                ignored: 1
            }
        );
    }

    #[test]
    fn a_line_may_arrive_in_pieces() {
        let (head, tail) = OK.split_at(17);
        assert_eq!(
            count(&[head, tail], true),
            Totals {
                passed: 3,
                failed: 0,
                ignored: 1
            }
        );
        assert_eq!(
            count(&[OK.trim_end()], true),
            Totals {
                passed: 3,
                failed: 0,
                ignored: 1
            }
        );
    }

    #[test]
    fn a_program_that_dies_without_a_result_is_a_failure() {
        assert_eq!(count(&["running 3 tests\ntest a ... "], false), Totals::ONE_FAILURE);
        assert_eq!(count(&["running 3 tests\n"], true), Totals::ONE_FAILURE);
    }

    #[test]
    fn a_program_that_fails_after_success_is_a_failure() {
        assert_eq!(
            count(&[OK], false),
            Totals {
                passed: 3,
                failed: 1,
                ignored: 1
            }
        );
    }

    #[test]
    fn other_lines_are_not_results() {
        assert_eq!(result_line("test result: ok"), None);
        assert_eq!(result_line("test result: ok. many passed; 0 failed; 0 ignored"), None);
        assert_eq!(result_line("10 passed, 0 failed"), None);
    }

    #[test]
    fn the_totals_line_is_plain() {
        assert_eq!(
            Totals {
                passed: 12,
                failed: 1,
                ignored: 3
            }
            .to_string(),
            "12 passed, 1 failed"
        );
    }
}
