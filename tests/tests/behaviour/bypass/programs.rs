//! A pod and the BPF programs on its own cgroup.

use std::fs::File;

use adit_tests::net;

use super::{MARKER, assert_never_in_plaintext, line_in_own_name};
use crate::world::{PORT, echo, world};

/// What container runtimes grant, with CAP_NET_ADMIN (12) besides: CHOWN, DAC_OVERRIDE, FOWNER, FSETID, KILL, SETGID,
/// SETUID, SETPCAP, NET_BIND_SERVICE, NET_RAW, SYS_CHROOT, MKNOD, AUDIT_WRITE, SETFCAP.
const POD: u64 = 1 << 12
    | 1
    | 1 << 1
    | 1 << 3
    | 1 << 4
    | 1 << 5
    | 1 << 6
    | 1 << 7
    | 1 << 8
    | 1 << 10
    | 1 << 13
    | 1 << 18
    | 1 << 27
    | 1 << 29
    | 1 << 31;

#[test]
fn without_cap_bpf_a_pod_can_neither_add_nor_remove_programs_on_its_cgroup() {
    let bed = world("no cap_bpf").start().unwrap();
    let (client, server) = (bed.pod("client"), bed.pod("server"));
    let _server = echo(server, PORT);
    let seen = client
        .run(|| {
            let cgroup = File::open(client.cgroup())?;
            net::keep_capabilities(POD)?;
            let errors = [
                net::load_allow_all().map(drop),
                net::detach_connect4(&cgroup, None),
                net::open_some_link().map(drop),
            ]
            .map(|result| result.err().and_then(|error| error.raw_os_error()));
            // Ours is not among what the second could find at the pod's cgroup.
            let eperm = Some(libc::EPERM);
            anyhow::ensure!(
                errors[0] == eperm && errors[1].is_some() && errors[2] == eperm,
                "{errors:?}"
            );
            net::ask(server.at(PORT), MARKER)
        })
        .unwrap();
    line_in_own_name(&bed, client, &seen);
}

#[test]
fn a_program_that_allows_everything_on_the_pods_own_cgroup_changes_nothing() {
    const BPF_F_ALLOW_MULTI: u32 = 2;
    let bed = world("allow all").start().unwrap();
    let (client, server) = (bed.pod("client"), bed.pod("server"));
    let _server = echo(server, PORT);
    let capture = bed.capture_link().unwrap();
    for flags in [0, BPF_F_ALLOW_MULTI] {
        let (seen, foreign) = client
            .run(|| {
                let cgroup = File::open(client.cgroup())?;
                let program = net::load_allow_all()?;
                net::attach_connect4(&cgroup, &program, flags)?;
                let seen = net::ask(server.at(PORT), MARKER)?;
                net::detach_connect4(&cgroup, Some(&program))?;
                // There is nothing more at the pod's cgroup: what decides is above it, and held by links.
                Ok((seen, net::detach_connect4(&cgroup, None).is_err()))
            })
            .unwrap();
        assert!(foreign);
        line_in_own_name(&bed, client, &seen);
        let seen = client.run(|| net::ask(server.at(PORT), MARKER)).unwrap();
        line_in_own_name(&bed, client, &seen);
    }
    // With CAP_BPF on the host even a detach by the old call does not take a link away.
    let pods = File::open(bed.node("n1").pods_cgroup()).unwrap();
    assert!(net::detach_connect4(&pods, None).is_err());
    let seen = client.run(|| net::ask(server.at(PORT), MARKER)).unwrap();
    line_in_own_name(&bed, client, &seen);
    assert_never_in_plaintext(&capture);
}
