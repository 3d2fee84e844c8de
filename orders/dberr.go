package orders

import (
	"context"
	"database/sql"
	"database/sql/driver"
	"errors"
	"io"
	"net"

	"github.com/go-sql-driver/mysql"
)

// Error numbers are stable across MySQL and MariaDB, texts are not: only numbers are compared.
const (
	errDuplicateKey  = 1062
	errLockWait      = 1205
	errDeadlock      = 1213
	errRecordChanged = 1020 // MariaDB: the row changed since the snapshot was taken
	errNoSavepoint   = 1305
	errNoSuchTable   = 1146
	errTableRights   = 1142
	errSafeUpdates   = 1175 // sql_safe_updates refuses a statement that reads a table from end to end
	errCheck         = 3819 // a CHECK constraint, in MySQL
	errCheckMariaDB  = 4025 // and in MariaDB
)

func number(err error) uint16 {
	var my *mysql.MySQLError
	if errors.As(err, &my) {
		return my.Number
	}
	return 0
}

// isCheck tells that a CHECK constraint refused the statement, which changed nothing.
func isCheck(err error) bool { return number(err) == errCheck || number(err) == errCheckMariaDB }

// IsRetryable reports whether an error of a …Tx function means that the caller should roll back its transaction and run it again
// from the start: a deadlock (1213), a lock wait that was cut off (1205), or a row that changed under MariaDB's snapshot (1020).
// After 1213 the transaction is already gone in the server: a statement that followed would be committed on its own.
func IsRetryable(err error) bool {
	switch number(err) {
	case errDeadlock, errLockWait, errRecordChanged:
		return true
	}
	return errors.Is(err, errAgain)
}

// notOurs are the server's errors that say nothing about the rows at hand: the same statement with other rows would fail too.
var notOurs = numbers(
	[]uint16{1020, 1205, 1213, 1412, 1614, 1615},                                                 // to be run again
	[]uint16{1021, 1030, 1037, 1038, 1041, 1114, 1135, 1206, 1637, 1878, 3675},                   // disk, memory, threads, lock table or storage engine
	[]uint16{1040, 1129, 1130, 1203, 1226},                                                       // connections
	[]uint16{1044, 1045, 1049, 1142, 1143, 1227, 1251, 1370, 1449, 1698, 1820, 1862, 3118, 3159}, // rights and accounts
	[]uint16{1054, 1136, 1146, 1356, 1364},                                                       // schema
	[]uint16{1034, 1035, 1194, 1195, 1812, 1813, 1814},                                           // table files
	[]uint16{1047, 1053, 1077, 1079, 1080, 1152, 1153, 1158, 1159, 1160, 1161, 1184, 3168, 4031}, // shutting down, not ready, connection lost
	[]uint16{1317, 1927, 1969, 3024, 3169},                                                       // killed, or cut off for the time it took
	[]uint16{1180, 1197, 1598, 3100, 3101},                                                       // commit, log and replication
	[]uint16{1290, 1792, 1836},                                                                   // read-only
)

// ofClient are the numbers of the client library (2006, 2013: the connection is lost), which proxies send on as a server's.
func ofClient(n uint16) bool { return 2000 <= n && n < 2100 }

// ofProxy are ProxySQL's own: no server of a hostgroup can be reached (9001), and the like.
func ofProxy(n uint16) bool { return 9000 <= n && n < 10000 }

func numbers(groups ...[]uint16) map[uint16]bool {
	set := map[uint16]bool{}
	for _, g := range groups {
		for _, n := range g {
			set[n] = true
		}
	}
	return set
}

// errNotReady marks what the database answers, or does not answer, before and after the statements that concern orders: connecting,
// beginning, asking for the time, committing. It is never the fault of an order, whatever its number or type: a certificate that has
// expired, a handshake, a plugin, a proxy's own error.
var errNotReady = errors.New("the database is not ready")

// IsUnavailable reports whether err says that the database, not an order, is the trouble: unreachable, shutting down, read-only, out
// of connections or space, without rights or schema, or too slow for the context. Whoever works on orders pauses then and asks again;
// halving a batch or parking an order is for other errors only. Safe for nil (false).
func IsUnavailable(err error) bool {
	if err == nil {
		return false
	}
	if errors.Is(err, errNotReady) || errors.Is(err, errAgain) {
		return true
	}
	if n := number(err); n != 0 {
		return notOurs[n] || ofClient(n) || ofProxy(n)
	}
	for _, known := range []error{
		driver.ErrBadConn, sql.ErrConnDone, sql.ErrTxDone, io.EOF, io.ErrUnexpectedEOF, context.DeadlineExceeded, context.Canceled,
		mysql.ErrInvalidConn, mysql.ErrMalformPkt, mysql.ErrPktSync, mysql.ErrPktSyncMul, mysql.ErrBusyBuffer,
	} {
		if errors.Is(err, known) {
			return true
		}
	}
	var netErr net.Error
	return errors.As(err, &netErr)
}
