//! Ending a pod's own connections from outside: `SOCK_DESTROY` of sock_diag(7).
//!
//! Its application then sees `ECONNABORTED`, and the peer a reset.

use std::collections::{HashMap, HashSet};
use std::io::{self, Read as _};
use std::net::{IpAddr, SocketAddr};

use socket2::{Domain, Protocol, Socket, Type};

const NETLINK_SOCK_DIAG: i32 = 4;
const SOCK_DIAG_BY_FAMILY: u16 = 20;
const SOCK_DESTROY: u16 = 21;
const NLMSG_ERROR: u16 = libc::NLMSG_ERROR as u16;
const NLMSG_DONE: u16 = libc::NLMSG_DONE as u16;
const NLM_F_REQUEST: u16 = libc::NLM_F_REQUEST as u16;
const NLM_F_ACK: u16 = libc::NLM_F_ACK as u16;
const NLM_F_DUMP: u16 = libc::NLM_F_DUMP as u16;

/// `struct nlmsghdr`.
const HEADER: usize = 16;
/// `struct inet_diag_sockid`.
const SOCKET_ID: usize = 48;
/// A header, and `struct inet_diag_req_v2` before its socket id.
const BEFORE_ID: usize = HEADER + 8;
const REQUEST: usize = BEFORE_ID + SOCKET_ID;
/// A header, and `struct inet_diag_msg` before its socket id.
const ANSWER_BEFORE_ID: usize = HEADER + 4;
/// Where a socket id has the interface, and the cookie after it.
const ID_INTERFACE: usize = 36;
const ID_COOKIE: usize = 40;

/// How many are asked for at once: the answers fit into the socket's receive buffer.
const BATCH: usize = 64;
/// More than the kernel puts into one answer.
const ANSWERS: usize = 64 << 10;

/// The states of connections, one bit each: all but TIME_WAIT (6), CLOSE (7), LISTEN (10) and what comes after
/// CLOSING (11).
const CONNECTIONS: u32 = 0b1011_0011_1110;

/// A TCP connection's socket.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct OpenSocket {
    /// Its own address.
    pub local: SocketAddr,
    /// Its peer's.
    pub remote: SocketAddr,
    /// The kernel's number of it (`SO_COOKIE`), which is never given again. Without it the kernel would take the next
    /// connection with the same addresses for it, or, where it has ended, a listener.
    pub cookie: u64,
}

/// The TCP sockets of one network namespace.
#[derive(Debug)]
pub struct SockDiag {
    netlink: Socket,
}

impl SockDiag {
    /// Opens the way to the sockets of the calling thread's network namespace. It may be used from anywhere.
    pub fn open() -> io::Result<Self> {
        let netlink = Socket::new(
            Domain::from(libc::AF_NETLINK),
            Type::RAW,
            Some(Protocol::from(NETLINK_SOCK_DIAG)),
        )?;
        // The kernel answers within the call that asks.
        netlink.set_nonblocking(true)?;
        Ok(Self { netlink })
    }

    /// Ends connections, and tells of each whether it was there to be ended. Fails where any could not be; the others
    /// may have been ended, and this is to be opened anew. Needs CAP_NET_ADMIN, and a kernel with
    /// `CONFIG_INET_DIAG_DESTROY`.
    pub fn destroy(&self, sockets: &[OpenSocket]) -> io::Result<Vec<bool>> {
        let mut outcomes = Outcomes {
            ended: vec![false; sockets.len()],
            error: None,
        };
        let by_address: Vec<_> = sockets.iter().map(Request::destroy).enumerate().collect();
        self.send_all(&by_address, &mut outcomes)?;
        // Not found by its addresses: it has ended, or it is bound to an interface, which the kernel wants to be told.
        let missing: HashMap<u64, usize> = sockets
            .iter()
            .enumerate()
            .filter(|(index, _)| !outcomes.ended[*index])
            .map(|(index, socket)| (socket.cookie, index))
            .collect();
        if !missing.is_empty() && outcomes.error.is_none() {
            let mut found = Vec::new();
            for family in [libc::AF_INET, libc::AF_INET6] {
                self.find(family as u8, &missing, &mut found)?;
            }
            self.send_all(&found, &mut outcomes)?;
        }
        match outcomes.error {
            Some(error) => Err(error),
            None => Ok(outcomes.ended),
        }
    }

    /// The cookies of all connections.
    pub fn cookies(&self) -> io::Result<HashSet<u64>> {
        let mut cookies = HashSet::new();
        for family in [libc::AF_INET, libc::AF_INET6] {
            self.dump(family as u8, |id| {
                cookies.insert(cookie_of(&id));
            })?;
        }
        Ok(cookies)
    }

    fn send_all(&self, requests: &[(usize, Request)], outcomes: &mut Outcomes) -> io::Result<()> {
        let mut answers = vec![0; ANSWERS];
        for batch in requests.chunks(BATCH) {
            let mut messages = Vec::with_capacity(batch.len() * REQUEST);
            for (index, request) in batch {
                messages.extend(request.message(*index as u32));
            }
            self.netlink.send(&messages)?;
            let mut open = batch.len();
            while open > 0 {
                for answer in self.answers(&mut answers)? {
                    open = open.saturating_sub(1);
                    outcomes.note(answer.sequence as usize, answer.error()?);
                }
            }
        }
        Ok(())
    }

    /// Finds sockets of one family by their cookies, among all of the namespace.
    fn find(&self, family: u8, wanted: &HashMap<u64, usize>, found: &mut Vec<(usize, Request)>) -> io::Result<()> {
        self.dump(family, |id| {
            if let Some(index) = wanted.get(&cookie_of(&id)) {
                found.push((*index, Request::of_id(family, id)));
            }
        })
    }

    /// Shows the ids of all connections of one family.
    fn dump(&self, family: u8, mut show: impl FnMut([u8; SOCKET_ID])) -> io::Result<()> {
        let all = Request {
            kind: SOCK_DIAG_BY_FAMILY,
            flags: NLM_F_REQUEST | NLM_F_DUMP,
            family,
            id: [0; SOCKET_ID],
        };
        self.netlink.send(&all.message(0))?;
        let mut answers = vec![0; ANSWERS];
        loop {
            for answer in self.answers(&mut answers)? {
                match answer.kind {
                    SOCK_DIAG_BY_FAMILY => show(answer.bytes(ANSWER_BEFORE_ID)?),
                    NLMSG_DONE => return Ok(()),
                    _ => return Err(answer.error()?.unwrap_or_else(|| malformed("not a socket"))),
                }
            }
        }
    }

    fn answers<'a>(&self, buffer: &'a mut [u8]) -> io::Result<Answers<'a>> {
        let len = (&self.netlink).read(buffer)?;
        Ok(Answers(&buffer[..len]))
    }
}

/// The cookie in a socket's id.
fn cookie_of(id: &[u8; SOCKET_ID]) -> u64 {
    let cookie = id.last_chunk().copied().unwrap_or_default();
    u64::from_ne_bytes(cookie)
}

struct Outcomes {
    ended: Vec<bool>,
    error: Option<io::Error>,
}

impl Outcomes {
    fn note(&mut self, index: usize, error: Option<io::Error>) {
        match error.as_ref().map(io::Error::raw_os_error) {
            None => {
                if let Some(ended) = self.ended.get_mut(index) {
                    *ended = true;
                }
            }
            // No socket there, or another one.
            Some(Some(libc::ENOENT | libc::ESTALE)) => {}
            Some(_) => {
                self.error
                    .get_or_insert_with(|| error.unwrap_or_else(|| malformed("no error")));
            }
        }
    }
}

/// A `struct inet_diag_req_v2`.
struct Request {
    kind: u16,
    flags: u16,
    family: u8,
    id: [u8; SOCKET_ID],
}

impl Request {
    fn destroy(socket: &OpenSocket) -> Self {
        // The kernel keeps a connection by mapped addresses as one of IPv4.
        let (local, remote) = (socket.local.ip().to_canonical(), socket.remote.ip().to_canonical());
        let mut id = [0; SOCKET_ID];
        id[0..2].copy_from_slice(&socket.local.port().to_be_bytes());
        id[2..4].copy_from_slice(&socket.remote.port().to_be_bytes());
        for (at, ip) in [(4, local), (20, remote)] {
            match ip {
                IpAddr::V4(ip) => id[at..at + 4].copy_from_slice(&ip.octets()),
                IpAddr::V6(ip) => id[at..at + 16].copy_from_slice(&ip.octets()),
            }
        }
        id[ID_INTERFACE..ID_COOKIE].copy_from_slice(&0_u32.to_ne_bytes());
        // Two words, the lower first.
        let (low, high) = (socket.cookie as u32, (socket.cookie >> 32) as u32);
        id[ID_COOKIE..ID_COOKIE + 4].copy_from_slice(&low.to_ne_bytes());
        id[ID_COOKIE + 4..].copy_from_slice(&high.to_ne_bytes());
        let family = if local.is_ipv4() { libc::AF_INET } else { libc::AF_INET6 };
        Self::of_id(family as u8, id)
    }

    /// To end the socket of an id as the kernel tells it.
    fn of_id(family: u8, id: [u8; SOCKET_ID]) -> Self {
        Self {
            kind: SOCK_DESTROY,
            flags: NLM_F_REQUEST | NLM_F_ACK,
            family,
            id,
        }
    }

    fn message(&self, sequence: u32) -> [u8; REQUEST] {
        let mut message = [0; REQUEST];
        message[0..4].copy_from_slice(&(REQUEST as u32).to_ne_bytes());
        message[4..6].copy_from_slice(&self.kind.to_ne_bytes());
        message[6..8].copy_from_slice(&self.flags.to_ne_bytes());
        message[8..12].copy_from_slice(&sequence.to_ne_bytes());
        message[HEADER] = self.family;
        message[HEADER + 1] = libc::IPPROTO_TCP as u8;
        message[HEADER + 4..BEFORE_ID].copy_from_slice(&CONNECTIONS.to_ne_bytes());
        message[BEFORE_ID..].copy_from_slice(&self.id);
        message
    }
}

/// The messages of one datagram of the kernel.
struct Answers<'a>(&'a [u8]);

impl<'a> Iterator for Answers<'a> {
    type Item = Answer<'a>;

    fn next(&mut self) -> Option<Answer<'a>> {
        let (header, _) = self.0.split_first_chunk::<HEADER>()?;
        let [l0, l1, l2, l3, k0, k1, _, _, s0, s1, s2, s3, ..] = *header;
        let len = u32::from_ne_bytes([l0, l1, l2, l3]) as usize;
        if len < HEADER || len > self.0.len() {
            return None;
        }
        let answer = Answer {
            kind: u16::from_ne_bytes([k0, k1]),
            sequence: u32::from_ne_bytes([s0, s1, s2, s3]),
            message: &self.0[..len],
        };
        self.0 = self.0.get(len.next_multiple_of(4)..).unwrap_or_default();
        Some(answer)
    }
}

struct Answer<'a> {
    kind: u16,
    sequence: u32,
    message: &'a [u8],
}

impl Answer<'_> {
    fn bytes<const N: usize>(&self, at: usize) -> io::Result<[u8; N]> {
        let bytes = self.message.get(at..).and_then(<[u8]>::first_chunk);
        bytes.copied().ok_or_else(|| malformed("cut short"))
    }

    /// What an acknowledgement says; none: done.
    fn error(&self) -> io::Result<Option<io::Error>> {
        if self.kind != NLMSG_ERROR {
            return Err(malformed("not an acknowledgement"));
        }
        let error = i32::from_ne_bytes(self.bytes(HEADER)?);
        Ok((error != 0).then(|| io::Error::from_raw_os_error(-error)))
    }
}

fn malformed(what: &str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, format!("an answer of sock_diag is {what}"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write as _;
    use std::net::{TcpListener, TcpStream};
    use std::process::Command;
    use std::time::{Duration, Instant};

    use nix::sched::{CloneFlags, unshare};
    use nix::sys::resource::{Resource, getrlimit, setrlimit};
    use socket2::SockRef;

    /// Runs `work` in a network namespace of its own.
    fn in_own_namespace(work: impl FnOnce(SockDiag) + Send + 'static) {
        let thread = std::thread::spawn(|| {
            unshare(CloneFlags::CLONE_NEWNET).unwrap();
            let up = Command::new("ip").args(["link", "set", "lo", "up"]).status().unwrap();
            assert!(up.success());
            work(SockDiag::open().unwrap());
        });
        if let Err(panic) = thread.join() {
            std::panic::resume_unwind(panic);
        }
    }

    fn open_socket(stream: &TcpStream) -> OpenSocket {
        OpenSocket {
            local: stream.local_addr().unwrap(),
            remote: stream.peer_addr().unwrap(),
            cookie: SockRef::from(stream).cookie().unwrap(),
        }
    }

    fn pair(listener: &TcpListener, to: SocketAddr) -> (TcpStream, TcpStream) {
        let client = TcpStream::connect(to).unwrap();
        client.set_read_timeout(Some(Duration::from_secs(5))).unwrap();
        let (server, _) = listener.accept().unwrap();
        server.set_read_timeout(Some(Duration::from_secs(5))).unwrap();
        (client, server)
    }

    fn works((client, server): &mut (TcpStream, TcpStream)) -> bool {
        let mut byte = [0];
        client.write_all(b"a").is_ok() && server.read_exact(&mut byte).is_ok()
    }

    fn read_error(stream: &mut TcpStream) -> io::ErrorKind {
        stream.read(&mut [0]).unwrap_err().kind()
    }

    #[test]
    fn a_connection_is_ended_and_its_peer_reset_while_others_go_on() {
        in_own_namespace(|diag| {
            for at in ["127.0.0.1:0", "[::1]:0", "[::ffff:127.0.0.1]:0"] {
                let listener = TcpListener::bind(at).unwrap();
                let to = listener.local_addr().unwrap();
                let (mut ended, mut other) = (pair(&listener, to), pair(&listener, to));
                assert_eq!(diag.destroy(&[open_socket(&ended.0)]).unwrap(), [true], "{at}");
                assert_eq!(read_error(&mut ended.0), io::ErrorKind::ConnectionAborted, "{at}");
                assert_eq!(read_error(&mut ended.1), io::ErrorKind::ConnectionReset, "{at}");
                assert!(works(&mut other), "{at}");
                assert!(works(&mut pair(&listener, to)), "the listener is still there: {at}");
            }
        });
    }

    #[test]
    fn what_has_ended_leaves_the_listener_and_the_next_with_its_addresses_alone() {
        in_own_namespace(|diag| {
            let listener = TcpListener::bind("127.0.0.1:0").unwrap();
            let mut open = pair(&listener, listener.local_addr().unwrap());
            let gone = OpenSocket {
                cookie: u64::MAX - 1,
                ..open_socket(&open.0)
            };
            // Which the kernel would look up to find the listener.
            let never = OpenSocket {
                remote: "127.0.0.1:1".parse().unwrap(),
                ..open_socket(&open.1)
            };
            let never = OpenSocket {
                cookie: u64::MAX - 2,
                ..never
            };
            assert_eq!(diag.destroy(&[gone, never]).unwrap(), [false, false]);
            assert!(works(&mut open));
            assert!(works(&mut pair(&listener, listener.local_addr().unwrap())));
        });
    }

    #[test]
    fn the_cookies_are_those_of_open_connections() {
        in_own_namespace(|diag| {
            let listeners = ["127.0.0.1:0", "[::1]:0"].map(|at| TcpListener::bind(at).unwrap());
            let pairs = listeners
                .each_ref()
                .map(|listener| pair(listener, listener.local_addr().unwrap()));
            let ends = pairs.iter().flat_map(|(client, server)| [client, server]);
            let wanted: HashSet<u64> = ends.map(|end| SockRef::from(end).cookie().unwrap()).collect();
            assert_eq!(diag.cookies().unwrap(), wanted);
        });
    }

    #[test]
    fn a_socket_bound_to_an_interface_is_found() {
        in_own_namespace(|diag| {
            let listener = TcpListener::bind("127.0.0.1:0").unwrap();
            let to = listener.local_addr().unwrap();
            let client = Socket::new(Domain::IPV4, Type::STREAM, None).unwrap();
            client.bind_device(Some(b"lo")).unwrap();
            client.connect(&to.into()).unwrap();
            let (mut client, _server) = (TcpStream::from(client), listener.accept().unwrap());
            let (mut free, _server) = pair(&listener, to);
            let both = [open_socket(&free), open_socket(&client)];
            assert_eq!(diag.destroy(&both).unwrap(), [true, true]);
            assert_eq!(read_error(&mut client), io::ErrorKind::ConnectionAborted);
            assert_eq!(read_error(&mut free), io::ErrorKind::ConnectionAborted);
        });
    }

    #[test]
    fn two_thousand_are_ended_within_a_fraction_of_a_second() {
        in_own_namespace(|diag| {
            let (soft, hard) = getrlimit(Resource::RLIMIT_NOFILE).unwrap();
            setrlimit(Resource::RLIMIT_NOFILE, soft.max(hard.min(8192)), hard).unwrap();
            let listener = TcpListener::bind("127.0.0.1:0").unwrap();
            let to = listener.local_addr().unwrap();
            let pairs: Vec<_> = (0..2000).map(|_| pair(&listener, to)).collect();
            let sockets: Vec<_> = pairs.iter().map(|(client, _)| open_socket(client)).collect();
            let start = Instant::now();
            let ended = diag.destroy(&sockets).unwrap();
            let took = start.elapsed();
            println!("{took:?}");
            assert!(ended.iter().all(|ended| *ended));
            assert!(took < Duration::from_millis(500), "{took:?}");
            for (client, server) in &pairs {
                assert!(client.take_error().unwrap().is_some());
                assert!(server.take_error().unwrap().is_some());
            }
        });
    }
}
