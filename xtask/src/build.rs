//! `build`: the kernel programs, then the workspace, which embeds them.

use anyhow::Result;

use crate::{
    bpf,
    context::{Context, step},
    process::{cargo, run},
};

/// Builds everything for release.
pub(crate) fn everything(context: &Context) -> Result<()> {
    bpf::build(context)?;
    step("build the workspace (release)", || {
        run(cargo(context).args(["build", "--release"]))
    })
}
