//! `ci`: everything that must pass before a change lands.

use crate::{
    context::{Context, say},
    fuzz, lint,
    test::{self, totals::Totals},
};

/// Runs lint, all tests and the fuzzer, each also if another fails. A lint that found problems, and tests or a fuzzer that
/// could not be run at all, count as one failure each, so that there are always totals.
pub(crate) fn run(context: &Context) -> Totals {
    let mut linted = Ok(());
    let tested = test::run_after(context, &test::Selection::default(), || linted = lint::run(context));
    let fuzzed = fuzz::run(context, &[], fuzz::SECONDS);
    let mut totals = Totals::default();
    for counted in [tested, fuzzed] {
        match counted {
            Ok(counted) => totals += counted,
            Err(error) => {
                say(&format!("error: {error:#}"));
                totals += Totals::ONE_FAILURE;
            }
        }
    }
    if let Err(error) = linted {
        say(&format!("error: {error:#}"));
        totals += Totals::ONE_FAILURE;
    }
    totals
}
