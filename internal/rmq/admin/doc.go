// Package admin creates, inspects and removes topics and consumer groups on a RocketMQ 5 broker.
//
// It speaks the broker's remoting protocol itself, in the few commands that lapse needs. The official Go client has no administration at all,
// and the official tool, mqadmin, takes seconds a call, needs Java, and exits 0 when it was refused.
package admin
