//! `test`: unit tests, integration tests, and the same integration tests on other kernels.

pub(crate) mod programs;
mod servers;
pub(crate) mod totals;

use std::{path::PathBuf, thread};

use anyhow::{Context as _, Result, anyhow, bail};

use crate::{
    build, cluster,
    context::{Context, say, step},
    packages,
    process::cargo,
    spire::{self, SPIRE},
    test::{programs::Program, totals::Totals},
    vm,
};

/// The integration tests that run in a virtual machine are in this program.
pub(crate) const BEHAVIOUR: &str = "behaviour";

/// Integration tests at a time. Each starts proxies and applications of its own, so more than one per core makes
/// their deadlines a lottery.
const INTEGRATION_THREADS: &str = "2";

/// The program that compares what is on the whole machine before and after: nothing else may run beside it.
const ALONE: &str = "residue";

/// What to test.
#[derive(Clone, Debug, Default, clap::Args)]
pub(crate) struct Selection {
    /// Run only the tests whose names contain one of these
    pub(crate) names: Vec<String>,
    /// Leave out what takes minutes: the tests on other kernels, and those of the documentation
    #[arg(long)]
    pub(crate) fast: bool,
}

/// What the tests need besides themselves.
struct Prepared {
    envoy: PathBuf,
    spire: Servers,
    cluster: Servers,
    kernels: Vec<vm::Kernel>,
}

/// Whether the tests can run that need servers which are built.
enum Servers {
    /// With programs from this folder, or from `PATH`.
    Ready(Option<PathBuf>),
    /// They are left out, and why.
    Impossible(String),
}

impl Servers {
    /// Who cannot build them tests the rest, but not in CI; and who asks for tests by name does not wait for what they may
    /// not need.
    fn prepare(
        selection: &Selection,
        (are_at_hand, obstacle): (bool, Option<String>),
        not_built: &str,
        prepare: impl FnOnce() -> Result<Option<PathBuf>>,
    ) -> Result<Self> {
        match obstacle {
            _ if !selection.names.is_empty() && !are_at_hand => Ok(Self::Impossible(not_built.to_owned())),
            Some(why) if !cluster::is_ci() => Ok(Self::Impossible(why)),
            _ => prepare().map(Self::Ready),
        }
    }
}

/// Runs the tests and gives the totals.
pub(crate) fn run(context: &Context, selection: &Selection) -> Result<Totals> {
    run_after(context, selection, || ())
}

/// Like [`run`], after other work, during which what the tests need is already being fetched.
pub(crate) fn run_after(context: &Context, selection: &Selection, before: impl FnOnce()) -> Result<Totals> {
    if !packages::is_root() {
        bail!(
            "the integration tests make network namespaces and cgroups and load kernel programs, for which they must \
             run as root; `cargo test --release` runs the unit tests as any user"
        );
    }
    let vm_names = vm_names(selection);
    let (prepared, programs) = thread::scope(|scope| {
        let preparing = scope.spawn(|| prepare(context, selection, vm_names.is_some()));
        before();
        let programs = build_all(context);
        let prepared = preparing
            .join()
            .map_err(|_| anyhow!("preparing the test servers panicked"))?;
        Ok::<_, anyhow::Error>((prepared?, programs?))
    })?;

    let mut totals = Totals::default();
    for program in programs.iter().filter(|program| !program.is_integration) {
        totals += programs::run(&program.name, &mut program.command(context, &selection.names))?;
    }
    if selection.names.is_empty() && !selection.fast {
        totals += documentation(context)?;
    }
    let on_nodes = |program: &Program| {
        let mut command = program.command(context, &selection.names);
        command.args(["--test-threads", INTEGRATION_THREADS]);
        command
            .env("ADIT_BIN", context.release("adit"))
            .env("ADIT_ENVOY", &prepared.envoy);
        match &prepared.spire {
            Servers::Ready(folder) => SPIRE.tell(&mut command, folder.as_deref()),
            Servers::Impossible(why) if program.name == BEHAVIOUR => {
                say(&format!("    the tests with SPIRE are left out: {why}"));
                command.args(["--skip", "spire::"]);
            }
            Servers::Impossible(_) => {}
        }
        programs::run(&program.name, &mut command)
    };
    let integration = programs.iter().filter(|program| program.is_integration);
    let (alone, others): (Vec<_>, Vec<_>) = integration.partition(|program| program.name == ALONE);
    for program in alone {
        totals += on_nodes(program)?;
    }
    let (on_cluster, others): (Vec<_>, Vec<_>) = others.into_iter().partition(|program| cluster::is_cluster(program));
    // The cluster waits most of the time, and neither sees the other.
    totals += thread::scope(|scope| {
        let cluster = scope.spawn(|| -> Result<Totals> {
            let mut totals = Totals::default();
            for program in on_cluster {
                totals += match &prepared.cluster {
                    Servers::Ready(folder) => {
                        cluster::run_tests(context, program, folder.as_deref(), &selection.names)?
                    }
                    Servers::Impossible(why) => {
                        say(&format!("    the tests on a Kubernetes cluster are left out: {why}"));
                        Totals::default()
                    }
                };
            }
            Ok(totals)
        });
        let mut totals = Totals::default();
        for program in others {
            totals += on_nodes(program)?;
        }
        if let Some(names) = vm_names {
            totals += vm::run_on(context, &prepared.kernels, &behaviour(&programs)?.executable, &names)?;
        }
        totals += cluster
            .join()
            .map_err(|_| anyhow!("the tests on a cluster panicked"))??;
        Ok::<_, anyhow::Error>(totals)
    })?;
    if totals == Totals::default() && !selection.names.is_empty() {
        bail!("no test has a name that contains {}", selection.names.join(" or "));
    }
    Ok(totals)
}

/// Builds all that the tests run, and the tests.
pub(crate) fn build_all(context: &Context) -> Result<Vec<Program>> {
    build::everything(context)?;
    step("build the tests (release)", || programs::build(context))
}

/// The program with the integration tests.
pub(crate) fn behaviour(programs: &[Program]) -> Result<&Program> {
    let found = programs
        .iter()
        .find(|program| program.is_integration && program.name == BEHAVIOUR);
    found.with_context(|| format!("the crate adit-tests has no integration test named {BEHAVIOUR}"))
}

/// Fetches and installs, while the build runs.
fn prepare(context: &Context, selection: &Selection, with_kernels: bool) -> Result<Prepared> {
    servers::applications(context)?;
    let envoy = servers::envoy(context)?;
    let kernels = if with_kernels {
        vm::prepare(context)?
    } else {
        Vec::new()
    };
    let cluster = Servers::prepare(
        selection,
        (cluster::are_programs_at_hand(context)?, cluster::obstacle(context)?),
        "Kubernetes or istiod is not built yet; `cargo xtask cluster test NAMES` does that",
        || cluster::prepare_tests(context),
    )?;
    let spire = Servers::prepare(
        selection,
        (SPIRE.are_at_hand(context)?, SPIRE.obstacle(context)?),
        "SPIRE is not built yet; `cargo xtask spire` does that",
        || spire::prepare(context),
    )?;
    Ok(Prepared {
        envoy,
        spire,
        cluster,
        kernels,
    })
}

/// The names to run in the virtual machines; `None` for no virtual machine. Names that were asked for go there only
/// if they belong to what runs there by default.
fn vm_names(selection: &Selection) -> Option<Vec<String>> {
    let default = || vm::DEFAULT_TESTS.iter().map(|name| (*name).to_owned());
    if selection.fast {
        None
    } else if selection.names.is_empty() {
        Some(default().collect())
    } else {
        let chosen: Vec<_> = selection
            .names
            .iter()
            .filter(|name| default().any(|module| name.starts_with(&module)))
            .cloned()
            .collect();
        (!chosen.is_empty()).then_some(chosen)
    }
}

/// The examples in the documentation. Rustdoc prints a result line per crate.
fn documentation(context: &Context) -> Result<Totals> {
    let mut cargo = cargo(context);
    // The selection of crates decides what features their dependencies have: another one would build them again.
    cargo.args([
        "test",
        "--release",
        "--doc",
        "--workspace",
        "--exclude",
        "adit-ebpf",
        "--quiet",
    ]);
    programs::run("documentation", &mut cargo)
}

/// Prints the line that sums everything up, and tells whether all is well.
pub(crate) fn report(totals: Totals) -> std::process::ExitCode {
    if totals.ignored > 0 {
        say(&format!("{} ignored", totals.ignored));
    }
    say(&totals.to_string());
    if totals.failed == 0 && totals.passed > 0 {
        std::process::ExitCode::SUCCESS
    } else {
        std::process::ExitCode::FAILURE
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn selection(names: &[&str], fast: bool) -> Selection {
        Selection {
            names: names.iter().map(|name| (*name).to_owned()).collect(),
            fast,
        }
    }

    #[test]
    fn without_names_the_machines_run_their_default() {
        assert_eq!(vm_names(&selection(&[], false)).unwrap(), vm::DEFAULT_TESTS);
    }

    #[test]
    fn names_go_to_the_machines_only_if_they_belong_there() {
        let module = vm::DEFAULT_TESTS[0];
        let name = format!("{module}::some_test");
        assert_eq!(
            vm_names(&selection(&[&name, "elsewhere"], false)),
            Some(vec![name.clone()])
        );
        assert_eq!(vm_names(&selection(&["elsewhere"], false)), None);
    }

    #[test]
    fn fast_leaves_the_machines_out() {
        assert_eq!(vm_names(&selection(&[], true)), None);
    }
}
