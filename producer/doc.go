// Package producer is what checkout code imports: it places orders, records payments, extends deadlines and cancels.
//
// It is a database client and nothing else. Placing an order commits the order and the outbox row that makes the relay send its timed
// message; the broker is not asked, so a broker that is slow or down cannot slow or fail a checkout. (A test holds that this package
// links neither RocketMQ nor gRPC.)
//
// Every verb exists twice. The …Tx form joins the transaction that the shop's own code has open on its gorm handle, so that the order,
// its outbox row and the shop's rows commit together or not at all; the other form opens a transaction of its own.
package producer
