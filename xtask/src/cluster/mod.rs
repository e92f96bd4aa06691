//! `cluster`: a Kubernetes cluster on this machine, and the tests on it.

mod istiod;
pub(crate) mod programs;

use std::{env, ffi::OsString, path::Path, process::ExitCode, process::Stdio};

use anyhow::{Context as _, Result, bail};

use crate::{
    build,
    cluster::{istiod::ISTIOD, programs::KUBERNETES},
    context::{Context, say},
    go::Programs,
    packages::{self, Need},
    process::{cargo, command, run},
    test::{self, programs::Program, totals::Totals},
};

/// The test program of the chart, which needs Helm.
const CHART: &str = "chart";

/// The test program that runs on a cluster.
pub(crate) const PROGRAM: &str = "cluster";

/// The program that brings clusters up, of the crate `adit-tests`.
const TOOL: &str = "adit-cluster";

/// Tests on the cluster at a time: some of them kill or replace what the others use.
const THREADS: &str = "1";

/// What nodes run beside Kubernetes, and what they are made with.
const NEEDS: [Need; 10] = [
    need("containerd", "containerd"),
    need("runc", "runc"),
    need("/usr/lib/cni/bridge", "containernetworking-plugins"),
    need("iptables", "iptables"),
    need("nft", "nftables"),
    need("conntrack", "conntrack"),
    need("busybox", "busybox-static"),
    need("ip", "iproute2"),
    need("nsenter", "util-linux"),
    need("strip", "binutils"),
];

const fn need(probe: &'static str, package: &'static str) -> Need {
    Need { probe, package }
}

/// What to do.
#[derive(clap::Args)]
pub(crate) struct Arguments {
    #[command(subcommand)]
    task: Task,
}

#[derive(clap::Subcommand)]
#[command(
    after_help = "And for the cluster itself, each with its own --help:\n  up      Bring it up\n  down    Take it down, or \
                  what is left of it\n  status  Say what clusters there are\n  kubectl, helm …  Run them on it\n  enter   \
                  Run a command on a machine of it\n  logs    Copy the logs of everything"
)]
enum Task {
    /// Find or build the programs of a cluster and of the tests on it, and install the Debian packages
    Build,
    /// Run the tests on a cluster of their own
    Test {
        /// Only those whose names contain one of these
        names: Vec<String>,
    },
    #[command(external_subcommand)]
    Other(Vec<OsString>),
}

/// Runs the task.
pub(crate) fn run_task(context: &Context, arguments: &Arguments) -> Result<ExitCode> {
    match &arguments.task {
        Task::Build => {
            let folder = prepare_tests(context)?;
            say(&match folder {
                Some(folder) => format!("the cluster's programs are in {}", folder.display()),
                None => "the cluster's programs are on PATH".to_owned(),
            });
            Ok(ExitCode::SUCCESS)
        }
        Task::Test { names } => {
            root_only()?;
            let folder = prepare_tests(context)?;
            let programs = test::build_all(context)?;
            let program = programs.iter().find(|program| is_cluster(program));
            let program = program.context("the crate adit-tests has no test program named cluster")?;
            Ok(test::report(run_tests(context, program, folder.as_deref(), names)?))
        }
        Task::Other(words) => other(context, words),
    }
}

/// Whether this is one of the test programs for [`run_tests`].
pub(crate) fn is_cluster(program: &Program) -> bool {
    program.is_integration && [PROGRAM, CHART].contains(&program.name.as_str())
}

/// Makes everything ready that a cluster needs but Adit. Gives the folder of programs, if they are not on `PATH`.
pub(crate) fn prepare(context: &Context) -> Result<Option<std::path::PathBuf>> {
    packages::ensure(context, "a Kubernetes cluster", &NEEDS)?;
    KUBERNETES.ensure(context)
}

/// What tests on a cluster run, as [`prepare_tests`] makes it ready.
const TESTED: [&Programs; 2] = [&KUBERNETES, &ISTIOD];

/// The same, and what only tests on a cluster need.
pub(crate) fn prepare_tests(context: &Context) -> Result<Option<std::path::PathBuf>> {
    ISTIOD.ensure(context)?;
    prepare(context)
}

/// Whether nothing that tests on a cluster run need be built.
pub(crate) fn are_programs_at_hand(context: &Context) -> Result<bool> {
    let mut each = TESTED.iter().map(|programs| programs.are_at_hand(context));
    each.try_fold(true, |all, one| Ok(all && one?))
}

/// Why something that tests on a cluster run can be neither found nor built.
pub(crate) fn obstacle(context: &Context) -> Result<Option<String>> {
    let mut each = TESTED.iter().map(|programs| programs.obstacle(context));
    each.find_map(Result::transpose).transpose()
}

/// Runs the tests of the chart; or those on a cluster, which is gone afterwards, however they end.
pub(crate) fn run_tests(
    context: &Context,
    program: &Program,
    folder: Option<&Path>,
    names: &[String],
) -> Result<Totals> {
    if program.name == CHART {
        let mut tests = program.command(context, names);
        KUBERNETES.tell(&mut tests, folder);
        return test::programs::run(&program.name, &mut tests);
    }
    let prefix = format!("x{}", std::process::id());
    let mut tests = program.command(context, names);
    tests
        .args(["--test-threads", THREADS])
        .env("ADIT_BIN", context.release("adit"))
        .env("ADIT_CLUSTER", &prefix);
    KUBERNETES.tell(&mut tests, folder);
    ISTIOD.tell(&mut tests, ISTIOD.find(context)?.as_deref());
    let outcome = test::programs::run(&program.name, &mut tests);
    let mut down = command(context, context.release(TOOL));
    let gone = run(down.args(["down", "--prefix", &prefix]).stdout(Stdio::null()));
    let mut totals = outcome?;
    if let Err(error) = gone {
        say(&format!("error: {error:#}"));
        totals += Totals::ONE_FAILURE;
    }
    Ok(totals)
}

/// What the program for clusters does itself.
fn other(context: &Context, words: &[OsString]) -> Result<ExitCode> {
    use std::os::unix::process::CommandExt as _;
    let up = words.first().is_some_and(|word| word == "up");
    let help = words.iter().any(|word| word == "--help" || word == "-h");
    let tool = context.release(TOOL);
    let folder = if up && !help {
        root_only()?;
        let folder = prepare(context)?;
        build::everything(context)?;
        folder
    } else {
        if !tool.is_file() {
            run(cargo(context).args(["build", "--release", "--package", "adit-tests", "--bin", TOOL]))?;
        }
        KUBERNETES.find(context)?
    };
    let mut program = command(context, &tool);
    program
        .args(words)
        .current_dir(env::current_dir()?)
        .stdin(Stdio::inherit());
    program.env("ADIT_BIN", context.release("adit"));
    KUBERNETES.tell(&mut program, folder.as_deref());
    let error = program.exec();
    Err(error).with_context(|| format!("starting {}", tool.display()))
}

fn root_only() -> Result<()> {
    if !packages::is_root() {
        bail!("a cluster's machines are made of namespaces, cgroups and mounts, which only root may make");
    }
    Ok(())
}

/// Whether everything must run, and what cannot is a failure.
pub(crate) fn is_ci() -> bool {
    env::var_os("CI").is_some_and(|value| value == "true")
}
