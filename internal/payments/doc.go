// Package payments is what lapse has to do with money: it asks the shop's payment service before an order is cancelled, closes the payment
// page, and gives back what must not stay.
//
// The database cannot know that a customer is paying just now, or has paid and the notice is still under way; only the gateway can. So with a
// gateway configured every cancel of a due order passes the [Gate]: the gateway is asked, told to close, and only then is the order cancelled,
// by the same conditional update as ever. No call is made inside a transaction, the calls are bounded in number and in time, and an order
// whose answer is not there is held and asked about again; it is never cancelled blind, and never makes another order wait.
//
// The [Worker] makes refunds and repeats closes that got no answer. Each row is claimed with a lease, and a lease is no proof against doing a
// thing twice: a process can be killed, or stopped for an hour, between any two steps. So every refund carries a key that is made of the
// payment it belongs to, and the contract asks the gateway to make one refund for a key, however often it comes. docs/gateway.md is the
// contract that a payment service implements.
package payments
