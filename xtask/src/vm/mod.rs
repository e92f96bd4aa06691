//! `vm`: the integration tests on Debian's kernels, in QEMU, side by side.

mod cpio;
mod image;
mod kernel;
mod machine;
mod modules;

use std::{ops::Add as _, path::Path, thread};

use anyhow::{Result, anyhow};

pub(crate) use kernel::Kernel;

use crate::{
    context::{Context, say, step},
    packages::{self, Need},
    process::{command, output},
    test::{self, totals::Totals},
};

/// The integration tests that depend on the kernel, by parts of their names, the most important first: what the hooks
/// do, and the main path. The rest would only repeat itself, slowly: a test costs some seconds under emulation.
pub(crate) const DEFAULT_TESTS: &[&str] = &[
    "paths::",
    "transparency::",
    "connect_variants::",
    "exclusions::an_excluded_port",
    "exclusions::what_a_pod_dials",
    "outside_mesh::a_p",
    "outside_mesh::udp_is_left_alone",
    "policy::a_policy_that_asks_for_an_identity",
    "reset::a_client_reset_reaches_the_server_as_a_reset",
    "reset::a_server_reset_before_the_first_byte",
    "refusal::a_dial_of_the_proxys_own_listeners",
    "own_ports::an_application_that_had_the_ports",
    "own_ports::the_applications_port_can_be_bound_again",
    "hairpin::a_pod_reaches_itself",
    "source_ports::one_source_port_serves",
    "direct::a_denied",
    "direct::a_policy_that_appears",
    "direct::the_log",
    "services_direct::an_endpoint_on_this_node",
    "services_direct::the_programs_say",
    "policy_change::an_open_stream",
    "crash::a_killed_proxy",
    "upgrade::a_proxy_that_has_handed_over",
    "upgrade::a_successor_that_dies",
    "tampering::programs_that_are_detached",
    "probes::the_kubelets_probes",
    "startup::what_start_up_permits",
    "limits::a_machine_that_has_no_files",
    "clock::",
];

/// Kernel series, oldest first: the oldest that Adit supports, and the newest that Debian offers for it.
const SERIES: &[&str] = &["6.1", "6.12"];

const NEEDS: &[Need] = &[
    Need {
        probe: "qemu-system-x86_64",
        package: "qemu-system-x86",
    },
    Need {
        probe: "busybox",
        package: "busybox-static",
    },
    Need {
        probe: "depmod",
        package: "kmod",
    },
    Need {
        probe: "xz",
        package: "xz-utils",
    },
    Need {
        probe: "strip",
        package: "binutils",
    },
    Need {
        probe: "ip",
        package: "iproute2",
    },
    Need {
        probe: "nsenter",
        package: "util-linux",
    },
];

/// What to run in the machines.
#[derive(Clone, Debug, clap::Args)]
pub(crate) struct Selection {
    /// Run only the tests whose names contain one of these, instead of the default modules
    names: Vec<String>,
    /// Run this test program instead of the integration tests; nothing is built then
    #[arg(long, value_name = "FILE")]
    program: Option<std::path::PathBuf>,
}

/// Runs tests on every kernel and gives the totals.
pub(crate) fn run(context: &Context, selection: &Selection) -> Result<Totals> {
    let default = || DEFAULT_TESTS.iter().map(|name| (*name).to_owned()).collect();
    if let Some(program) = &selection.program {
        return run_on(context, &prepare(context)?, program, &selection.names);
    }
    let names = if selection.names.is_empty() {
        default()
    } else {
        selection.names.clone()
    };
    let (kernels, programs) = thread::scope(|scope| {
        let kernels = scope.spawn(|| prepare(context));
        let programs = test::build_all(context);
        let kernels = kernels.join().map_err(|_| anyhow!("preparing the kernels panicked"))?;
        Ok::<_, anyhow::Error>((kernels?, programs?))
    })?;
    run_on(context, &kernels, &test::behaviour(&programs)?.executable, &names)
}

/// Installs the emulator and fetches the kernels.
pub(crate) fn prepare(context: &Context) -> Result<Vec<Kernel>> {
    packages::ensure(context, "running tests on other kernels", NEEDS)?;
    SERIES.iter().map(|series| kernel::fetch(context, series)).collect()
}

/// Runs the test program on each kernel, all at the same time. A machine that does not run counts as a failure.
pub(crate) fn run_on(context: &Context, kernels: &[Kernel], program: &Path, names: &[String]) -> Result<Totals> {
    let list = kernels.iter().map(Kernel::name).collect::<Vec<_>>().join(" and ");
    step(&format!("tests on {list}: {}", names.join(" ")), || {
        let mut sum = Totals::default();
        let tests = output(command(context, program).arg("--list"))?;
        for name in names_without_tests(names, &tests) {
            say(&format!("    error: no test has a name that contains {name}"));
            sum += Totals::ONE_FAILURE;
        }
        let userland = image::userland(context, program, names)?;
        let run = |kernel: &Kernel| match machine::run(context, kernel, &userland) {
            Ok(totals) => totals,
            Err(error) => {
                say(&format!("[{}] error: {error:#}", kernel.name()));
                Totals::ONE_FAILURE
            }
        };
        let outcomes: Vec<_> = thread::scope(|scope| {
            let machines: Vec<_> = kernels.iter().map(|kernel| scope.spawn(|| run(kernel))).collect();
            machines
                .into_iter()
                .map(|machine| machine.join().unwrap_or(Totals::ONE_FAILURE))
                .collect()
        });
        for (kernel, totals) in kernels.iter().zip(&outcomes) {
            say(&format!("    {}: {totals}", kernel.name()));
        }
        Ok(outcomes.into_iter().fold(sum, Totals::add))
    })
}

/// The names that select nothing from the output of a test program's `--list`: a module that was renamed must not go
/// untested in silence.
fn names_without_tests<'a>(names: &'a [String], list: &str) -> Vec<&'a String> {
    let tests: Vec<_> = list.lines().filter_map(|line| line.strip_suffix(": test")).collect();
    names
        .iter()
        .filter(|name| !tests.iter().any(|test| test.contains(name.as_str())))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_that_selects_no_test_is_found() {
        let names = ["transparency".to_owned(), "steering".to_owned()];
        let list = "transparency::accept_shows_the_client: test\nsteering_wheel: benchmark\n\n1 test, 1 benchmark\n";
        assert_eq!(names_without_tests(&names, list), [&names[1]]);
    }
}
