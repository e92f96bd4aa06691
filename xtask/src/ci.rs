//! `ci`: everything that must pass before a change lands.

use crate::{
    context::{Context, say},
    lint,
    test::{self, totals::Totals},
};

/// Runs lint and all tests, each also if the other fails. A lint that found problems, and tests that could not be run
/// at all, count as one failure each, so that there are always totals.
pub(crate) fn run(context: &Context) -> Totals {
    let mut linted = Ok(());
    let tested = test::run_after(context, &test::Selection::default(), || linted = lint::run(context));
    let mut totals = Totals::default();
    match tested {
        Ok(counted) => totals += counted,
        Err(error) => {
            say(&format!("error: {error:#}"));
            totals += Totals::ONE_FAILURE;
        }
    }
    if let Err(error) = linted {
        say(&format!("error: {error:#}"));
        totals += Totals::ONE_FAILURE;
    }
    totals
}
