//! The keys of the file that limit what clients on the network may do.

use std::net::SocketAddr;

use crate::config::reader::Reader;

/// Which clients may change the log level at run time.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum LogLevelEndpoint {
    /// None.
    Off,
    /// Clients on the loopback interface: operators who may forward a port of the pod.
    #[default]
    Loopback,
}

/// Checked keys of the listeners.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PortConfig {
    /// Address of the page and of the queries for people.
    pub page_listen: SocketAddr,
    /// Accepted host names, in lower case; IP addresses and `localhost` are always accepted.
    pub allowed_hosts: Vec<String>,
    /// Most connections of the listener for verbs.
    pub max_connections: usize,
    /// Most bytes that they may hold: requests, and answers that clients have not read.
    pub max_in_flight_bytes: usize,
    /// Which clients may change the log level.
    pub log_level_endpoint: LogLevelEndpoint,
}

impl Default for PortConfig {
    fn default() -> Self {
        let names = ["", ".gpu-system", ".gpu-system.svc", ".gpu-system.svc.cluster.local"];
        Self {
            page_listen: SocketAddr::from(([127, 0, 0, 1], 8081)),
            allowed_hosts: names.map(|rest| format!("gpupack{rest}")).to_vec(),
            max_connections: 8_192,
            max_in_flight_bytes: 64 << 20,
            log_level_endpoint: LogLevelEndpoint::default(),
        }
    }
}

impl PortConfig {
    /// Takes its keys out of `reader`. Two bodies must fit: a complete body is copied once.
    pub(crate) fn read(reader: &mut Reader, max_body_bytes: usize) -> Self {
        let default = Self::default();
        let mut hosts = reader.names("allowed_hosts", default.allowed_hosts);
        hosts.iter_mut().for_each(|host| host.make_ascii_lowercase());
        let least = 2 * max_body_bytes;
        let connections = reader.number("max_connections", 16..=1_000_000, 8_192);
        let in_flight = reader.number_or_none("max_in_flight_mib", 8..=65_536);
        let in_flight = in_flight.and_then(|mib| usize::try_from(mib << 20).ok());
        if let Some(bytes) = in_flight.filter(|bytes| *bytes < least) {
            let (mib, least) = (bytes >> 20, least >> 20);
            reader.faults.push(format!(
                "`max_in_flight_mib: {mib}` is not allowed: it must be {least} or more, twice `max_body_mib`"
            ));
        }
        Self {
            page_listen: reader.parsed(
                "page_listen",
                "an address such as `0.0.0.0:8081`",
                default.page_listen,
            ),
            allowed_hosts: hosts,
            max_connections: usize::try_from(connections).unwrap_or(default.max_connections),
            max_in_flight_bytes: in_flight.unwrap_or(default.max_in_flight_bytes.max(least)),
            log_level_endpoint: reader.word(
                "log_level_endpoint",
                &[("off", LogLevelEndpoint::Off), ("loopback", LogLevelEndpoint::Loopback)],
                default.log_level_endpoint,
            ),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::file::Config;

    #[test]
    fn every_key_is_read() {
        let text = "page_listen: 0.0.0.0:9\nallowed_hosts: [A.example]\nmax_connections: 100\n\
            max_in_flight_mib: 100\nlog_level_endpoint: off\n";
        let expected = PortConfig {
            page_listen: "0.0.0.0:9".parse().unwrap(),
            allowed_hosts: vec!["a.example".to_owned()],
            max_connections: 100,
            max_in_flight_bytes: 100 << 20,
            log_level_endpoint: LogLevelEndpoint::Off,
        };
        assert_eq!(Config::from_yaml(text).unwrap().port, expected);
        assert_eq!(Config::from_yaml("").unwrap().port, PortConfig::default());
    }

    #[test]
    fn two_bodies_fit_and_less_is_a_fault() {
        let port = |text: &str| Config::from_yaml(text).map(|config| config.port);
        assert_eq!(port("max_body_mib: 100").unwrap().max_in_flight_bytes, 200 << 20);
        let both = "max_body_mib: 100\nmax_in_flight_mib: ";
        assert_eq!(port(&format!("{both}200")).unwrap().max_in_flight_bytes, 200 << 20);
        for (text, part) in [
            (&*format!("{both}199"), "`max_in_flight_mib: 199` is not allowed: it must be 200"),
            ("max_in_flight_mib: 7", "8 to 65536"),
            ("max_connections: 15", "16 to 1000000"),
            ("page_listen: here", "an address such as"),
            ("allowed_hosts: []", "at least one name"),
            ("log_level_endpoint: network", "`off` or `loopback`"),
        ] {
            let faults = port(text).unwrap_err().faults;
            assert!(faults.len() == 1 && faults[0].contains(part), "{faults:?}");
        }
    }
}
