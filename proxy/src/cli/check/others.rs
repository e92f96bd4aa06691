//! What is found of others that steer connections too: their programs, their listeners, their CNI plugins.

use std::path::PathBuf;

use super::finding::Finding;
use crate::node::PodListener;
use crate::steer::AttachedProgram;

/// The ports at which sidecars and node proxies of other meshes listen in pods.
pub(super) const MESH_PORTS: [u16; 3] = [15001, 15006, 15008];
/// The command name of Adit's own processes.
const OURS: &str = "adit";

/// How programs of others that are known to rewrite destinations begin, whose they are, and what to do.
const KNOWN: [(&str, &str); 5] = [
    (
        "cil_sock",
        "Cilium's socket load-balancer: set socketLB.hostNamespaceOnly=true, so that pods' connections to services reach Adit",
    ),
    (
        "calico_connect",
        "Calico's connect-time load-balancer: set bpfConnectTimeLoadBalancing: Disabled in its FelixConfiguration",
    ),
    ("mb_sock", "Merbridge's: remove it, one mesh steers a pod at a time"),
    (
        "cgroup_connect",
        "Kmesh's: remove it, or take its pods out of one of both meshes",
    ),
    (
        "sock4_connect",
        "a socket load-balancer's: take the pods out of its reach",
    ),
];

/// What CNI configurations are looked for, and whose they are.
const PLUGINS: [(&str, &str); 3] = [
    ("istio-cni", "Istio's"),
    ("linkerd-cni", "Linkerd's"),
    ("kuma-cni", "Kuma's"),
];

/// The programs at a cgroup.
#[derive(Debug)]
pub(super) struct CgroupPrograms {
    pub(super) cgroup: PathBuf,
    pub(super) programs: Result<Vec<AttachedProgram>, String>,
}

/// What others have attached to the pods' cgroup and those above it.
pub(super) fn programs(cgroups: &[CgroupPrograms]) -> Vec<Finding> {
    const NAME: &str = "programs of others";
    let mut findings = Vec::new();
    for CgroupPrograms { cgroup, programs } in cgroups {
        let cgroup = cgroup.display();
        let programs = match programs {
            Ok(programs) => programs,
            Err(error) => {
                findings.push(Finding::warning(
                    NAME,
                    format!("asking what is attached to {cgroup}: {error}"),
                    "run it as root, with NET_ADMIN and SYS_ADMIN",
                ));
                continue;
            }
        };
        for program in programs.iter().filter(|program| !program.is_ours()) {
            let name = if program.name.is_empty() {
                "(no name)"
            } else {
                &program.name
            };
            let known = KNOWN.iter().find(|(start, _)| program.name.starts_with(start));
            let advice = known.map_or_else(
                || {
                    format!(
                        "find out whose it is: bpftool prog show id {}; if it changes where pods' connections go, keep it off \
                         pods that are in the mesh",
                        program.id
                    )
                },
                |(_, whose)| (*whose).to_owned(),
            );
            let what = format!("{name} (id {}) at {} of {cgroup}", program.id, program.hook);
            findings.push(Finding::warning(NAME, what, advice));
        }
    }
    if findings.is_empty() {
        let hooks = "none at connect, sock_ops and getpeername of the pods' cgroup and those above it";
        findings.push(Finding::ok(NAME, hooks));
    }
    findings
}

/// Listeners in pods at ports where other meshes have theirs.
pub(super) fn listeners(listeners: &[PodListener]) -> Vec<Finding> {
    const NAME: &str = "listeners of others";
    let mut findings: Vec<Finding> = Vec::new();
    for PodListener { pod, port, process } in listeners {
        let process = process.as_deref();
        if process == Some(OURS) {
            continue;
        }
        let whose = process.map_or_else(
            || "a process that cannot be seen".to_owned(),
            |name| format!("`{name}`"),
        );
        let advice = match process {
            Some("envoy" | "pilot-agent") => {
                "a sidecar carries this pod: remove its injection, or keep the pod out of Adit's mesh"
            }
            Some("ztunnel") => {
                "Istio's ambient mode carries this pod: take it out of there (istio.io/dataplane-mode) first"
            }
            _ => {
                "if it is another mesh's proxy, let one of both carry this pod; a server of the application does no harm"
            }
        };
        let finding = Finding::warning(NAME, format!("{whose} listens at port {port} in pod {pod}"), advice);
        // At two addresses it is the same.
        if !findings.contains(&finding) {
            findings.push(finding);
        }
    }
    if findings.is_empty() {
        let ports = MESH_PORTS.map(|port| port.to_string()).join(", ");
        findings.push(Finding::ok(NAME, format!("none in pods at ports {ports}")));
    }
    findings
}

/// What was seen of the folder of CNI configurations.
#[derive(Debug)]
pub(super) struct CniFacts {
    pub(super) folder: PathBuf,
    /// Name and content of each.
    pub(super) files: Vec<(String, String)>,
}

/// CNI plugins of other meshes; nothing where the folder cannot be seen.
pub(super) fn cni(facts: Option<&CniFacts>) -> Vec<Finding> {
    const NAME: &str = "CNI plugins";
    let Some(CniFacts { folder, files }) = facts else {
        return Vec::new();
    };
    let mut findings = Vec::new();
    for (file, content) in files {
        for (plugin, whose) in PLUGINS {
            if file.contains(plugin) || content.contains(&format!("\"{plugin}\"")) {
                findings.push(Finding::warning(
                    NAME,
                    format!("{whose} {plugin} in {}", folder.join(file).display()),
                    "it redirects pods that its own mesh has: see that no pod is in both",
                ));
            }
        }
    }
    if findings.is_empty() {
        findings.push(Finding::ok(
            NAME,
            format!("none of another mesh in {}", folder.display()),
        ));
    }
    findings
}

#[cfg(test)]
mod tests {
    use super::super::finding::Level;
    use super::*;

    fn program(id: u32, name: &str) -> AttachedProgram {
        AttachedProgram {
            id,
            name: name.to_owned(),
            hook: "connect4",
        }
    }

    fn at(cgroup: &str, programs: Result<Vec<AttachedProgram>, String>) -> CgroupPrograms {
        CgroupPrograms {
            cgroup: cgroup.into(),
            programs,
        }
    }

    #[test]
    fn programs_of_others_are_named_with_id_hook_and_cgroup() {
        let quiet = programs(&[
            at("/c", Ok(vec![])),
            at("/c/pods", Ok(vec![program(1, "adit_connect4")])),
        ]);
        assert_eq!((quiet.len(), quiet[0].level), (1, Level::Ok));
        let found = programs(&[
            at("/c", Ok(vec![program(7, "cil_sock4_conne")])),
            at("/c/pods", Ok(vec![program(1, "adit_connect4"), program(8, "")])),
            at("/c/x", Err("EPERM".to_owned())),
        ]);
        let lines: Vec<_> = found
            .iter()
            .map(|finding| (finding.level, finding.what.as_str()))
            .collect();
        assert_eq!(
            lines,
            [
                (Level::Warning, "cil_sock4_conne (id 7) at connect4 of /c"),
                (Level::Warning, "(no name) (id 8) at connect4 of /c/pods"),
                (Level::Warning, "asking what is attached to /c/x: EPERM"),
            ]
        );
        assert!(found[0].advice.as_ref().unwrap().contains("Cilium"));
        assert!(found[1].advice.as_ref().unwrap().contains("bpftool prog show id 8"));
    }

    #[test]
    fn listeners_but_ours_are_told_once_each() {
        let listener = |port, process: Option<&str>| PodListener {
            pod: "u".to_owned(),
            port,
            process: process.map(str::to_owned),
        };
        let seen = [
            listener(15001, Some("envoy")),
            listener(15001, Some("envoy")),
            listener(15008, Some("ztunnel")),
            listener(15006, Some("adit")),
            listener(15006, None),
        ];
        let found = listeners(&seen);
        assert_eq!(found.len(), 3);
        assert!(found[0].advice.as_ref().unwrap().contains("sidecar"));
        assert!(found[1].advice.as_ref().unwrap().contains("ambient"));
        assert!(found[2].what.contains("cannot be seen"));
        assert_eq!(listeners(&seen[3..4])[0].level, Level::Ok);
    }

    #[test]
    fn plugins_of_other_meshes_are_found_by_file_and_by_content() {
        let facts = |file: &str, content: &str| CniFacts {
            folder: "/etc/cni/net.d".into(),
            files: vec![(file.to_owned(), content.to_owned())],
        };
        for (file, content, level) in [
            ("10-bridge.conflist", "{\"plugins\":[{\"type\":\"bridge\"}]}", Level::Ok),
            (
                "10-bridge.conflist",
                "{\"plugins\":[{\"type\":\"istio-cni\"}]}",
                Level::Warning,
            ),
            ("YYY-istio-cni.conf", "", Level::Warning),
        ] {
            assert_eq!(cni(Some(&facts(file, content)))[0].level, level, "{file}");
        }
        assert!(cni(None).is_empty());
    }
}
