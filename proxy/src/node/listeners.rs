//! Who listens at a port in pods' network namespaces.

use std::collections::{HashMap, HashSet};
use std::fs;
use std::path::Path;

use super::pod_cgroup::{inode, pod_of, processes, uid_of};

/// The state of listening sockets in `/proc/net/tcp`.
const LISTEN: &str = "0A";

/// A socket that listens in a pod's network namespace.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PodListener {
    /// The pod's uid, or what its cgroup is called where that has none.
    pub pod: String,
    /// The port.
    pub port: u16,
    /// The command name of a process that has the socket; none where no process can be seen that has.
    pub process: Option<String>,
}

/// The sockets that listen at one of `ports` in network namespaces of processes below `pods_cgroup`, but for that of
/// inode `host`, which is the node's own. Needs to see the node's processes (hostPID) and CAP_SYS_PTRACE.
pub fn pod_listeners(pods_cgroup: &Path, host: u64, ports: &[u16]) -> Vec<PodListener> {
    let mut found = Vec::new();
    for (pod, pid) in one_process_each(pods_cgroup, host) {
        for table in ["tcp", "tcp6"] {
            // The process may be gone.
            let text = fs::read_to_string(format!("/proc/{pid}/net/{table}")).unwrap_or_default();
            let sockets = listening(&text).filter(|(port, _)| ports.contains(port));
            found.extend(sockets.map(|(port, socket)| (pod.clone(), port, socket)));
        }
    }
    let wanted: HashSet<u64> = found.iter().map(|(_, _, socket)| *socket).collect();
    let owners = if wanted.is_empty() {
        HashMap::new()
    } else {
        owners(&wanted)
    };
    let listener = |(pod, port, socket)| PodListener {
        pod,
        port,
        process: owners.get(&socket).cloned(),
    };
    found.into_iter().map(listener).collect()
}

/// The name of each pod with a network namespace of its own, and one of the processes in it.
fn one_process_each(pods_cgroup: &Path, host: u64) -> Vec<(String, u32)> {
    let (mut pids, mut seen) = (Vec::new(), HashSet::from([host]));
    processes(pods_cgroup, &mut pids);
    pids.retain(|pid| inode(Path::new(&format!("/proc/{pid}/ns/net"))).is_some_and(|inode| seen.insert(inode)));
    pids.into_iter().map(|pid| (pod_name(pods_cgroup, pid), pid)).collect()
}

/// The uid of the pod of a process, or what its cgroup is called.
fn pod_name(pods_cgroup: &Path, pid: u32) -> String {
    let own = fs::read_to_string(format!("/proc/{pid}/cgroup")).unwrap_or_default();
    let path = own
        .lines()
        .find_map(|line| line.strip_prefix("0::"))
        .unwrap_or_default();
    // The same path, from where the pods' cgroup begins.
    let root = pods_cgroup.file_name().unwrap_or_default().to_string_lossy();
    let below = path.split_once(&format!("/{root}/")).map_or(path, |(_, below)| below);
    let cgroup = pod_of(pods_cgroup, &pods_cgroup.join(below.trim_start_matches('/')));
    let name = cgroup.file_name().unwrap_or_default().to_string_lossy();
    uid_of(&cgroup).unwrap_or_else(|| name.into_owned())
}

/// Port and inode of each listening socket of a table as `/proc/net/tcp` is.
fn listening(table: &str) -> impl Iterator<Item = (u16, u64)> {
    table.lines().skip(1).filter_map(|line| {
        let fields: Vec<&str> = line.split_ascii_whitespace().collect();
        let (local, state, socket) = (fields.get(1)?, fields.get(3)?, fields.get(9)?);
        let port = u16::from_str_radix(local.rsplit_once(':')?.1, 16).ok()?;
        (*state == LISTEN).then_some((port, socket.parse().ok()?))
    })
}

/// The command names of processes that have these sockets.
fn owners(sockets: &HashSet<u64>) -> HashMap<u64, String> {
    let mut owners = HashMap::new();
    let numbers = fs::read_dir("/proc").into_iter().flatten().flatten();
    for pid in numbers.filter_map(|entry| entry.file_name().to_str()?.parse::<u32>().ok()) {
        let files = fs::read_dir(format!("/proc/{pid}/fd")).into_iter().flatten().flatten();
        for link in files.filter_map(|file| fs::read_link(file.path()).ok()) {
            let Some(socket) = socket_of(&link.to_string_lossy()).filter(|socket| sockets.contains(socket)) else {
                continue;
            };
            let command = fs::read_to_string(format!("/proc/{pid}/comm")).unwrap_or_default();
            owners.insert(socket, command.trim_end().to_owned());
        }
    }
    owners
}

fn socket_of(link: &str) -> Option<u64> {
    link.strip_prefix("socket:[")?.strip_suffix(']')?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_listening_sockets_of_a_table_count() {
        let table = "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode\n   \
            0: 00000000:3A99 00000000:0000 0A 00000000:00000000 00:00000000 00000000  1337        0 4711 1 0 100 0 0 10 0\n   \
            1: 0100007F:3A99 0100007F:9C40 01 00000000:00000000 00:00000000 00000000  1337        0 4712 1 0 20 4 30 10 -1\n";
        assert_eq!(listening(table).collect::<Vec<_>>(), [(15001, 4711)]);
        let table6 = "header\n   0: 00000000000000000000000000000000:3A9E 00000000000000000000000000000000:0000 0A \
            00000000:00000000 00:00000000 00000000     0        0 99 1 0 100 0 0 10 0\n";
        assert_eq!(listening(table6).collect::<Vec<_>>(), [(15006, 99)]);
    }

    #[test]
    fn a_socket_is_told_by_its_link() {
        for (link, socket) in [("socket:[12]", Some(12)), ("pipe:[12]", None), ("/dev/null", None)] {
            assert_eq!(socket_of(link), socket, "{link}");
        }
    }

    #[test]
    fn a_sockets_owner_is_named() {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let link = fs::read_link(format!("/proc/self/fd/{}", std::os::fd::AsRawFd::as_raw_fd(&listener))).unwrap();
        let socket = socket_of(&link.to_string_lossy()).unwrap();
        assert!(!owners(&HashSet::from([socket]))[&socket].is_empty());
    }
}
