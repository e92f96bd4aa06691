//! `spire`: a SPIRE server and agent for the tests, at the version that `tests/spire/` pins.

use std::path::PathBuf;

use anyhow::Result;

use crate::{
    context::{Context, say},
    go::{Build, Module, Programs},
    packages::{self, Need},
};

/// Both of them.
pub(crate) const SPIRE: Programs = Programs {
    what: "SPIRE",
    variable: "ADIT_SPIRE_BIN",
    cache: "spire",
    version_of: "github.com/spiffe/spire",
    modules: &[Module {
        folder: "tests/spire",
        files: &[],
        // The server's SQLite is written in C.
        cgo: true,
        builds: &[
            Build {
                name: "spire-server",
                package: "github.com/spiffe/spire/cmd/spire-server",
                link: "-s -w",
                programs: &[],
            },
            Build {
                name: "spire-agent",
                package: "github.com/spiffe/spire/cmd/spire-agent",
                link: "-s -w",
                programs: &[],
            },
        ],
    }],
};

/// Makes them ready. Gives their folder if they are not on `PATH`.
pub(crate) fn prepare(context: &Context) -> Result<Option<PathBuf>> {
    let compiler = Need {
        probe: "cc",
        package: "gcc",
    };
    packages::ensure(context, SPIRE.what, &[compiler])?;
    SPIRE.ensure(context)
}

/// Makes them ready and says where they are.
pub(crate) fn run_task(context: &Context) -> Result<()> {
    say(&match prepare(context)? {
        Some(folder) => format!("SPIRE's programs are in {}", folder.display()),
        None => "SPIRE's programs are on PATH".to_owned(),
    });
    Ok(())
}
