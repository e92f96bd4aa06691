//! `ci`: everything that must pass before a change lands.

use anyhow::Result;

use crate::{
    context::{Context, say},
    lint,
    test::{self, totals::Totals},
};

/// Runs lint and all tests, also if lint fails, which counts as one failure.
pub(crate) fn run(context: &Context) -> Result<Totals> {
    let linted = lint::run(context);
    let mut totals = test::run(context, &test::Selection::default())?;
    if let Err(error) = linted {
        say(&format!("{error:#}"));
        totals += Totals::ONE_FAILURE;
    }
    Ok(totals)
}
